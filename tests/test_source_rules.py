"""Commands that fail unseen, and names gone from NKI: each form is found, each right one passes."""

import pytest

from qwen3_trainium import profiles, source_rules
from qwen3_trainium.errors import SettingError


def found(rule, source):
    tree = source_rules.parse_cell(source)
    return rule(tree, source_rules.imported_names(tree))


@pytest.mark.parametrize(
    "source",
    [
        "!torchrun train.py",
        "out = !torchrun train.py",
        "if ready:\n    !torchrun train.py",
        "for name in names:\n    !echo {name}",
        "!!ls",
        "%system false",
        "%sx false",
        "out = %sx false",
        "%%system\nfalse",
        "%%sx\nfalse",
        "%%!\nfalse",
        "%%bash --no-raise-error\nfalse",
        "%%script --bg bash\nfalse",
        "%time !false",
        "%timeit -n 1 -r 1 __import__('os').system('false') or os.system('false')",
        "%%time\n!false",
        "%%capture out\nresult = !false",
        "get_ipython().system('false')",
        "shell = get_ipython()\nshell.system('false')",
        "get_ipython().getoutput('false')",
        "get_ipython().run_line_magic(name, line)",
        "import os\nos.system('false')",
        "import os as o\no.popen('false')",
        "from os import system\nsystem('false')",
        "import subprocess\nsubprocess.run(['false'])",
        "import subprocess\nsubprocess.run(['false'], check=False)",
        "import subprocess\nsubprocess.run(['false'], check=strict)",
        "import subprocess as sp\nsp.call(['false'])",
        "from subprocess import Popen as P\nP(['false'])",
        "from subprocess import run\nrun(['false'])",
        "import subprocess\nsubprocess.getoutput('false')",
        "import asyncio\nawait asyncio.create_subprocess_shell('false')",
    ],
)
def test_a_command_whose_failure_nobody_sees_is_found(source):
    assert source_rules.COMMAND in found(source_rules.command_faults, source)


@pytest.mark.parametrize(
    "source",
    [
        "%%bash\nfalse",
        "%%bash -s {x}\nfalse || exit 3",
        "%%bash\n# two commands\nset -euo pipefail\nfalse | tee log\ntrue",
        "import subprocess\nsubprocess.run(['false'], check=True)",
        "import subprocess\nsubprocess.check_call(['false'])",
        "import subprocess\nsubprocess.check_output(['false'])",
        "from qwen3_trainium import launch\nlaunch.launch('native', 'published', settings)",
        "import platform\nplatform.system()",
        "if a != b:\n    print('!torchrun', a % b)",
        "%matplotlib inline",
        "%time f()",
        "%timeit -n 1 f()",
        "f?",
    ],
)
def test_what_raises_or_runs_no_command_passes(source):
    assert found(source_rules.command_faults, source) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("%%bash\nfalse\ntrue", "goes on after a command"),
        ("%%sh\nset -u\nfalse\ntrue", "goes on after a command"),
        ("%%bash\nfalse | tee log", "before a pipe"),
        ("%%bash\nset -e\nfalse | tee log", "before a pipe"),
    ],
)
def test_a_script_must_end_with_its_first_failure(source, fault):
    assert [fault in said for said in found(source_rules.command_faults, source)] == [True]


@pytest.mark.parametrize("source", ["%pip install x", "%conda install x", "%uv pip install x"])
def test_an_installation_is_found(source):
    assert found(source_rules.command_faults, source) == [source_rules.INSTALLS]


def test_old_names_of_nki_are_found():
    source = (
        "import neuronxcc.nki.language as nl\n"
        "def kernel(a):\n"
        "    i = nl.arange(128)\n"
        "    return nl.load(a[i], mask=i < 100)\n"
    )
    faults = found(source_rules.old_nki_faults, source)
    assert [fault.split(",")[0] for fault in faults] == [
        "imports neuronxcc",
        "uses mask=",
        "uses arange",
    ]


@pytest.mark.parametrize(
    "source",
    [
        "from neuronxcc import nki",
        "from nki.language import mgrid as grid\ngrid[0:128]",
        "import nki\nnki.language.par_dim(128)",
        "from nki import isa as nisa\nnisa.dma_copy(a, b, dst_rmw_op='add')",
        "import nki.language as nl\nfor i in nl.dynamic_range(3):\n    pass",
    ],
)
def test_an_old_name_is_found_however_it_is_imported(source):
    assert len(found(source_rules.old_nki_faults, source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.arange(3)\nnp.ma.array(x, mask=m)",
        "import torch\ntorch.arange(3)",
        "import nki.isa as nisa\nnisa.nc_match_replace8(a, imm=0.0)",
        "import nki.language as nl\nnl.affine_range(4)\nattention(mask=m)",
    ],
)
def test_names_that_are_not_old_pass(source):
    assert found(source_rules.old_nki_faults, source) == []


def test_files_are_read_and_an_old_name_fails_them(tmp_path, capsys):
    (tmp_path / "kernel.py").write_text("import nki.language as nl\nx = nl.arange(4)\n")
    assert source_rules.main([str(tmp_path)]) == 1
    assert "kernel.py: uses arange, which is gone since NKI 0.3" in capsys.readouterr().out
    with pytest.raises(SettingError, match="no Python file was found"):
        source_rules.main([str(tmp_path / "nowhere")])


def test_our_kernels_use_no_old_name():
    kernels = profiles.ROOT / "src" / "qwen3_trainium" / "kernels"
    assert source_rules.main([str(kernels)]) == 0
