"""Equations as MathML, which browsers draw themselves: no script, no font and no other host is needed to read them."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as tree

# A fence and what is in it, or a span of code: nothing in there is an equation.
_CODE = re.compile(r"^(?P<fence> *(?:```+|~~~+)).*?^(?P=fence)[`~]*\s*$|(?P<ticks>`+)[^`].*?(?P=ticks)", re.M | re.S)
_DISPLAY = re.compile(r"^(?P<indent> *)\$\$\s*(?P<latex>.+?)\s*\$\$ *$", re.M | re.S)
_INLINE = re.compile(r"(?<![\\$\w])\$(?P<latex>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\d$])")
_BIG = r"\\[bB]igg?[lrm]?(?![A-Za-z])\s*"
_OPENS, _CLOSES = re.compile(_BIG + r"(?=[(\[]|\\\{)"), re.compile(_BIG + r"(?=[)\]]|\\\})")
_DROPPED = re.compile(_BIG + r"|\\(?:textstyle|displaystyle)(?![A-Za-z])|\\!")


def with_equations(text: str) -> str:
    """Markdown with `$$ ... $$` on lines of their own and `$ ... $` within a line turned to MathML."""
    parts, end = [], 0
    for match in _CODE.finditer(text):
        parts += [_replaced(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, _replaced(text[end:])])


def _replaced(text: str) -> str:
    def display(match: re.Match[str]) -> str:
        lines = [part for part in split_lines(plain(match["latex"])) if part]
        drawn = "".join(f"<div>{mathml(line, block=True)}</div>" for line in lines)
        return f'\n{match["indent"]}<div class="equation">{drawn}</div>\n'

    text = _DISPLAY.sub(display, text)
    return _INLINE.sub(lambda match: mathml(match["latex"]), text)


def plain(latex: str) -> str:
    """The equation in the commands that the converter knows: signs of a chosen size become pairs that grow with what
    is between them."""
    latex = " ".join(latex.split()).replace(r"\arg\max", r"\mathrm{argmax}")
    latex = re.sub(r"\\(mathcal|mathbf|mathbb) (\w)", r"\\\1{\2}", latex)
    if len(_OPENS.findall(latex)) == len(_CLOSES.findall(latex)):
        latex = _CLOSES.sub(r"\\right", _OPENS.sub(r"\\left", latex))
    return " ".join(_DROPPED.sub(" ", latex).split())


def split_lines(latex: str) -> list[str]:
    r"""The parts of an equation that `\qquad` and `\quad` outside of braces keep apart: each becomes a line, which a
    narrow screen can show whole."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(latex):
        if latex[place] == "\\":
            word = re.match(r"\\(?:[A-Za-z]+|.)", latex[place:], re.S)
            command = word[0] if word else "\\"
            depth += {r"\left": 1, r"\begin": 1, r"\right": -1, r"\end": -1}.get(command, 0)
            if command in (r"\qquad", r"\quad") and depth == 0:
                parts.append(latex[start:place].strip())
                start = place + len(command)
            place += len(command)
            continue
        depth += {"{": 1, "}": -1}.get(latex[place], 0)
        place += 1
    return [*parts, latex[start:].strip()]


@functools.cache
def mathml(latex: str, block: bool = False) -> str:
    """MathML of an equation, in one line, in which Markdown finds nothing to change.

    Raises:
        ValueError: the converter does not understand it.
    """
    from latex2mathml.converter import convert

    try:
        root = tree.fromstring(convert(plain(latex), display="block" if block else "inline"))
    except Exception as error:  # of many kinds, for one cause
        raise ValueError(f"the equation {latex!r} cannot be shown: {error!r}; write it in simpler LaTeX") from error
    unknown = [node.text for node in root.iter() if node.text and node.text.startswith("\\")]
    if unknown:
        raise ValueError(f"the equation {latex!r} has {unknown[0]!r}, which nothing draws; write it in other words")
    return _written(root)


def _written(node: tree.Element) -> str:
    name = node.tag.rpartition("}")[2]
    attributes = dict(node.attrib)
    if name == "math":
        attributes = {"display": attributes["display"]} if attributes.get("display") == "block" else {}
    marks = "".join(f' {key}="{_escaped(value)}"' for key, value in attributes.items())
    inner = _escaped(node.text or "") + "".join(_written(child) + _escaped(child.tail or "") for child in node)
    return f"<{name}{marks}>{inner}</{name}>"


def _escaped(text: str) -> str:
    """What is neither letter nor digit as numbers: no sign of it means anything to Markdown."""
    return "".join(sign if sign.isalnum() and sign.isascii() else f"&#{ord(sign)};" for sign in text)
