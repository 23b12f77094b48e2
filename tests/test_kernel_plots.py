"""Figures about kernels say what the trace says."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.patches import Rectangle

from nki_sim import trace
from qwen3_trainium import kernel_backend, kernel_plots
from qwen3_trainium.kernels.rope import rope_kernel_bshd


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def recorded():
    q, k = (torch.empty(1, 1024, H, 128, device="meta") for H in (32, 8))
    cache = torch.empty(1024, 256, device="meta")
    with kernel_backend.as_if_lnc(2), trace(shapes_only=True) as t:
        rope_kernel_bshd[2](q, k, cache)
    return t


def test_tiles_of_a_trace_add_up_to_its_live_memory(recorded):
    for record in recorded.records:
        live = sum(
            life.bytes
            for launch, core, life in recorded.tiles
            if (launch, core) == (record.launch, record.core)
            and life.place == "sbuf"
            and life.first <= record.number <= life.last
        )
        assert live == record.sbuf


def test_boxes_of_the_tile_map_do_not_overlap_and_reach_the_peak(recorded):
    ax = kernel_plots.tile_map(recorded)
    boxes = [p.get_bbox() for p in ax.patches if isinstance(p, Rectangle)]
    assert len(boxes) == sum(core == 0 for _, core, _ in recorded.tiles)
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            apart_in_time = a.x1 <= b.x0 + 1e-6 or b.x1 <= a.x0 + 1e-6
            assert apart_in_time or a.y1 <= b.y0 + 1e-6 or b.y1 <= a.y0 + 1e-6
    assert max(box.y1 for box in boxes) == recorded.peak_sbuf / 1024
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names == ["cache_PNW", "x_tile", "straight", "crossed", "y_tile"]


def test_a_part_of_a_kernel_can_be_shown(recorded):
    ax = kernel_plots.tile_map(recorded, instructions=8)
    assert ax.get_xlim()[1] == 9


def test_shares_of_pieces_end_at_all_bytes(recorded):
    (line,) = kernel_plots.pieces({"kernel": recorded}).get_lines()[:1]
    sizes, shares = line.get_data()
    assert list(sizes[1:-1]) == list(recorded.pieces())
    assert shares[0] == 0
    assert shares[-2] == pytest.approx(100)


def test_traffic_stacks_copies_on_the_kernel():
    ax = kernel_plots.traffic({"a": (2**20, 2**21), "b": (2**20, 0)}, least=2**20)
    assert [bar.get_width() for bar in ax.patches] == [1, 1, 2, 0]
    assert ax.get_lines()[0].get_xdata()[0] == 1


def test_contents_of_partitions_are_labelled_by_position():
    owner = torch.tensor([[[0, 0], [0, 0], [1, 0]], [[2, 1], [3, 1], [3, 1]]]).numpy()
    (ax,) = kernel_plots.partition_contents({"layout": owner}, "title")[:, 0]
    assert [text.get_text() for text in ax.texts] == ["0", "1", "2", "3"]


def test_row_tiles_name_every_row():
    ax = kernel_plots.row_tiles(300)
    said = {text.get_text() for text in ax.texts}
    assert {"rows 0–127", "rows 128–255", "rows 256–299", "tile 2", "partition 127"} <= said
