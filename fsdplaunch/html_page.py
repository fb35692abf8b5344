"""The frame of our HTML pages: no script, no network, no font but the reader's own. Pure: returns text."""

from html import escape

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { font-size: 1.2rem; font-weight: 600; }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; list-style: none; }
.key i { display: inline-block; width: .9rem; height: .9rem; margin-right: .4rem; vertical-align: -.1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid rgba(128,128,128,.35); }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
svg { width: 100%; height: auto; } svg text { fill: currentColor; font-size: 13px; }
"""


def html_page(title: str, body: str, *, style: str = "") -> str:
    """Return a page.

    Args:
        title: As text; escaped here.
        body: As HTML.
        style: Rules of this page's own, after those of all.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}{style}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )
