"""A report as one HTML file: words, pictures, tables. Nothing in it is fetched from anywhere, and nothing runs. Pure.

Everything that is said may come from outside (a model's name is what a server says it is), so words get in through
``escaped`` alone, and a policy in the file forbids browsers all but its own style sheet.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from .chart import Picture
from .sheet import Sheet
from .svg import STYLE, escaped, panel_svg

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
CSS = """\
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;max-width:1240px;margin:0 auto;
padding:1.5em;color:#222222;background:#ffffff;overflow-wrap:anywhere}
h1{font-size:1.5em;margin:0 0 .5em}h2{font-size:1.15em;margin:2em 0 .5em}
p{margin:.35em 0}.lead{font-size:1.1em}.warn{border-left:4px solid #d55e00;padding-left:.7em}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,430px),1fr));align-items:end;
gap:28px 40px;margin-top:1.5em}.pictures svg{width:100%}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.2em .6em;border-bottom:1px solid #dddddd;white-space:nowrap}
th{border-bottom:2px solid #777777}.w{text-align:left}td.w{white-space:normal}
.good{color:#00735a;font-weight:bold}.bad{color:#b04a00;font-weight:bold}.small{font-size:.9em}
@media(prefers-color-scheme:dark){body{color:#dddddd;background:#14171c}th,td{border-color:#444444}
.good{color:#2fc49a}.bad{color:#f08040}}
@media print{.pictures svg{break-inside:avoid}}
"""


@frozen
class Page:
    """From top to bottom: what came of it, what must be known before it is believed, pictures, tables; under
    which conditions it was measured, and what words mean."""

    title: str
    lead: tuple[str, ...]
    warnings: tuple[str, ...]
    picture: Picture
    sheets: tuple[Sheet, ...]
    conditions: tuple[str, ...]
    notes: tuple[str, ...] = ()


def html_of(page: Page) -> str:
    """The same bytes for the same page."""
    return "\n".join(_lines(page)) + "\n"


def _lines(page: Page) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escaped(page.title)}</title>\n<style>\n{CSS}{STYLE}\n</style>\n</head>\n<body>"
    yield f"<h1>{escaped(page.title)}</h1>"
    yield from (f'<p class="lead">{escaped(line)}</p>' for line in page.lead)
    yield from (f'<p class="warn">{escaped(line)}</p>' for line in page.warnings)
    yield '<div class="pictures">'
    yield from map(panel_svg, page.picture.panels)
    yield "</div>"
    for sheet in page.sheets:
        yield from _table(sheet)
    yield "<h2>Conditions</h2>"
    yield from (f"<p>{escaped(line)}</p>" for line in page.conditions)
    yield from (f'<p class="small">{escaped(line)}</p>' for line in page.notes)
    yield "</body>\n</html>"


def _table(sheet: Sheet) -> Iterator[str]:
    words = [' class="w"' if sheet.is_words(place) else "" for place in range(len(sheet.columns))]
    yield f'<h2>{escaped(sheet.title)}</h2>\n<div class="scroll"><table>\n<thead><tr>'
    yield "".join(f"<th{how}>{escaped(column)}</th>" for how, column in zip(words, sheet.columns, strict=True))
    yield "</tr></thead>\n<tbody>"
    for row in sheet.rows:
        yield "<tr>" + "".join(
            f"<td{how}>" + (f'<span class="{cell.mood}">{escaped(cell.text)}</span>' if cell.mood else
                            escaped(cell.text)) + "</td>"
            for how, cell in zip(words, row, strict=True)) + "</tr>"
    yield "</tbody></table></div>"
