r"""MkDocs hook: LaTeX to MathML while the site is built.

`pymdownx.arithmatex` (generic) leaves `<span class="arithmatex">\(..\)</span>` and
`<div class="arithmatex">\[..\]</div>` in a page, from its Markdown and from docstrings alike. Here
each becomes MathML, which browsers show without a script, a font or a connection. latex2mathml
passes over what it does not know; every such formula is a warning here, which `--strict` turns
into an error.
"""

import html as html_text
import logging
import re
import unicodedata
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from typing import Any

from latex2mathml.commands import MATRICES
from latex2mathml.converter import convert

log = logging.getLogger("mkdocs.hooks.mathml")

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\s*\\[(\[](?P<latex>.*?)\\[)\]]\s*</(?P=tag)>',
    re.DOTALL,
)
CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.DOTALL)
LEFT_OVER = re.compile(r'class="arithmatex">\s*\\|\\[(\[]|\$\$')
MATHML = "http://www.w3.org/1998/Math/MathML"
CHILDREN = {
    "mfrac": 2,
    "mroot": 2,
    "msub": 2,
    "msup": 2,
    "munder": 2,
    "mover": 2,
    "msubsup": 3,
    "munderover": 3,
}


class UnsupportedError(ValueError):
    """A formula that cannot be shown as it was meant."""


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Converts every formula of a page and warns of what cannot be converted."""
    source = page.file.src_uri

    def replace(match: re.Match[str]) -> str:
        latex = html_text.unescape(match["latex"]).strip()
        try:
            formula = to_mathml(latex, "inline" if match["tag"] == "span" else "block")
        except UnsupportedError as error:
            log.warning("%s: %s in the formula %s", source, error, latex)
            return match[0]
        style = "" if match["tag"] == "span" else ' style="margin: 1em 0"'
        return f'<{match["tag"]} class="arithmatex"{style}>{formula}</{match["tag"]}>'

    html = FORMULA.sub(replace, html)
    prose = FORMULA.sub("", CODE.sub("", html))
    for left in LEFT_OVER.finditer(prose):
        around = prose[max(0, left.start() - 40) : left.end() + 40].replace("\n", " ")
        log.warning("%s: LaTeX was left as it is near '%s'", source, around)
    for title in _titles(page.toc):
        if re.search(r"\\[(\[]|\$", title):
            log.warning("%s: the heading '%s' has a formula; menus cannot show it", source, title)
    return html


def to_mathml(latex: str, display: str = "inline") -> str:
    """The MathML of one formula; raises UnsupportedError where something would be lost."""
    # To latex2mathml, `split` is what LaTeX calls `aligned`.
    latex = re.sub(r"\\(begin|end)\{aligned\}", r"\\\1{split}", latex)
    for environment in re.findall(r"\\begin\{(.*?)\}", latex):
        if rf"\{environment}" not in MATRICES:
            raise UnsupportedError(f"unsupported environment '{environment}'")
    bare = re.sub(r"\\[\\{}]", "", latex)
    if bare.count("{") != bare.count("}"):
        raise UnsupportedError("unbalanced braces")
    try:
        math = ET.fromstring(convert(latex, display=display))
    except ET.ParseError as error:
        raise UnsupportedError("misplaced '&'") from error
    except Exception as error:  # its errors share no base class
        raise UnsupportedError(f"{type(error).__name__} {error}".strip()) from error
    for element in math.iter():
        _check(element)
        _restyle(element)
    ET.register_namespace("", MATHML)
    return ET.tostring(math, encoding="unicode")


def _name(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def _check(element: ET.Element) -> None:
    name, text = _name(element), element.text or ""
    if unknown := re.search(r"\\([A-Za-z]+|.)", text):
        raise UnsupportedError(f"unsupported command '{unknown[0]}'")
    if len(element) != CHILDREN.get(name, len(element)):
        raise UnsupportedError(f"missing argument ({name})")
    if element.get("linebreak"):
        raise UnsupportedError(r"'\\' outside an environment such as aligned")


def _restyle(element: ET.Element) -> None:
    """Replaces what browsers leave out of MathML 3, and spaces operators the way TeX does."""
    variant = element.get("mathvariant", "normal")
    if variant != "normal" and element.text:
        element.text = "".join(_styled(c, variant.replace("-", " ").upper()) for c in element.text)
        del element.attrib["mathvariant"]
    if align := element.attrib.pop("columnalign", None):
        gap = "; padding-right: 0" if align == "right" else ""
        element.set("style", f"text-align: {align}{gap}")
    if _name(element) == "mo" and element.text == "\u2016" and "stretchy" not in element.attrib:
        element.set("stretchy", "false")  # only \left and \right stretch a norm
    if _name(element) == "mo" and (element.text or "").isalpha():
        element.attrib.update(lspace="0", rspace="0.167em")


def _styled(character: str, style: str) -> str:
    r"""A letter or digit in Unicode's mathematical alphabet, so w in BOLD is U+1D430."""
    plain = unicodedata.name(character, "").replace("LETTER ", "")
    plain = plain.removeprefix("LATIN ").removeprefix("GREEK ")
    try:
        return unicodedata.lookup(f"MATHEMATICAL {style} {plain}")
    except KeyError:
        return character  # italic h, punctuation: no such form, or none needed


def _titles(toc: Iterable[Any]) -> Iterable[str]:
    for item in toc:
        yield item.title
        yield from _titles(item.children)
