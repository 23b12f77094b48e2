"""`report.html`: the verdict and every executed lesson on one page that needs nothing else.

No script, style sheet, font or picture is fetched: the page can be mailed, archived or opened on
a machine without a network. Formulas become MathML, which browsers draw themselves.
"""

import html
import re
from pathlib import Path

import bs4
import jinja2
import latex2mathml.converter
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter

from qwen3_trainium import checks
from qwen3_trainium.progress import ANSI

STYLE = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")


def render(lessons: list, facts: dict, verdict: dict, folder: Path) -> str:
    """The page for `runner.Lesson`s; `folder` is where pictures named by their prose are found."""
    ran = "passed" if verdict["passed"] else "FAILED"
    body = [
        "<header><h1>Train Qwen3 on AWS Trainium with torchtitan</h1>",
        f"<p class=verdict-line>{checks.badge(ran, f'verdict: {ran}')} "
        f"{sum(lesson.status == 'passed' for lesson in lessons)} of {len(lessons)} lessons passed; "
        f"checks: {html.escape(checks.summary(verdict['checks']))}</p>",
        *_what_ran(facts),
        "</header><main>",
        *(_broken(lesson) for lesson in lessons if lesson.error),
        "<section><h2>Verdict</h2>",
        *(_lesson_verdict(lesson) for lesson in lessons),
        "</section>",
        *(_lesson(lesson, folder) for lesson in lessons if lesson.status != "not run"),
        "</main>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Qwen3 on Trainium: {ran}</title>"
        f"<style>{STYLE}\n{HtmlFormatter().get_style_defs('.highlight')}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _what_ran(facts):
    machine, versions = facts["machine"], facts["versions"]
    yield (
        f"<p>Profile <b>{machine['profile']}</b>: {machine['ranks']} ranks on device "
        f"<b>{machine['device']}</b>, {machine['cpus']} CPUs, {machine['memory_gib']} GiB of "
        f"memory, {html.escape(machine['platform'])}.</p>"
    )
    if machine["device"] == "cpu":
        yield (
            "<p class=warning><b>Nothing on this page was verified on Trainium hardware.</b> "
            "The lessons ran at reduced width on CPUs, their kernels in a simulator or as a "
            "PyTorch reference.</p>"
        )
    pairs = (f"{name} {version}" for name, version in versions.items())
    yield f"<p class=versions>{html.escape(' · '.join(pairs))}</p>"


def _broken(lesson):
    """What went wrong, before anything else: the sentence, the cell, and the end of its error."""
    parts = [
        f"<section class=broken><h2>{html.escape(lesson.name)}: {html.escape(lesson.status)}</h2>",
        f"<p>{html.escape(lesson.error)}</p>",
    ]
    if lesson.status == "check failed":
        parts.append(
            checks.verdict_html([record for record in lesson.checks() if record["passed"] is False])
        )
    elif lesson.broken_cell is not None:
        cell = lesson.notebook.cells[lesson.broken_cell]
        parts.append(f"<pre class=source>{html.escape(cell.source)}</pre>")
        for output in cell.outputs:
            if output.output_type == "error":
                # Sixty lines hold the failing frame; the whole traceback stands in the lesson.
                lines = ANSI.sub("", "\n".join(output.traceback)).splitlines()[-60:]
                parts.append(f"<pre class=error>{html.escape(chr(10).join(lines))}</pre>")
    return "".join([*parts, "</section>"])


def _lesson_verdict(lesson):
    name, status = html.escape(lesson.name), html.escape(lesson.status)
    if lesson.status == "not run":
        return f"<h3>{name} {checks.badge('skipped', 'not run')}</h3>"
    badge = checks.badge("passed" if lesson.status == "passed" else "FAILED", status)
    table = checks.verdict_html(lesson.checks()) if lesson.checks() else "<p>no checks</p>"
    return (
        f'<h3><a href="#{name}">{name}</a> {badge} '
        f"<small>{lesson.seconds:.0f} s</small></h3>{table}"
    )


def _lesson(lesson, folder):
    exporter = _Exporter(template_name="basic", anchor_link_text="", embed_images=True)
    page, _ = exporter.from_notebook_node(
        lesson.notebook, resources={"metadata": {"path": str(folder)}}
    )
    name = html.escape(lesson.name)
    return (
        f'<section class=lesson id="{name}"><p class=file>{name}.ipynb</p>{_closed(page)}</section>'
    )


def _closed(page: str) -> str:
    """The page without what a browser would fetch from elsewhere, or run."""
    soup = bs4.BeautifulSoup(page, "html.parser")
    for tag in soup(["script", "link", "iframe", "object", "embed", "base", "meta"]):
        tag.decompose()
    for tag in soup(src=True):
        if not tag["src"].startswith("data:"):
            link = soup.new_tag("a", href=tag["src"])
            link.string = tag.get("alt") or tag["src"]
            tag.replace_with(link)
    for tag in soup("style"):
        if re.search(r"@import|url\((?!\s*['\"]?data:)", tag.get_text()):
            tag.decompose()
    return str(soup)


class _Renderer(IPythonRenderer):
    def inline_math(self, body):
        return latex2mathml.converter.convert(body)

    def block_math(self, body):
        return latex2mathml.converter.convert(body, display="block")


class _Exporter(HTMLExporter):
    @jinja2.pass_context
    def markdown2html(self, context, source):
        renderer = _Renderer(
            escape=False,
            attachments=context.get("cell", {}).get("attachments", {}),
            embed_images=True,
            path=context["resources"]["metadata"]["path"],
            anchor_link_text="",
            exclude_anchor_links=True,
        )
        return MarkdownWithMath(renderer=renderer).render(source)
