# SPDX-License-Identifier: Apache-2.0
"""Text files line by line, and CSV and TSV before they are read as tables: what a lenient reader guesses at is refused
here, with the number of the line."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
DAMAGED = (OSError, EOFError, lzma.LZMAError, zlib.error)  # what a compressed file raises that is not whole
_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
_BOM = "\ufeff"
_UTF_8 = "utf-8"
_encoding: ContextVar[str] = ContextVar("encoding", default=_UTF_8)
_texts: ContextVar[tuple[str, ...]] = ContextVar("texts", default=())
_LONGEST_FIELD = 2**31 - 1  # the module `csv` stops at 128 KiB, and a text may be longer


@contextmanager
def reading_as(encoding: str, texts: Sequence[str] = ()) -> Iterator[None]:
    """Files of text are read in an encoding while the block runs. Raises ValueError for an unknown one.

    texts: columns of tables whose fields stay as they are, where "02100" is no number.
    """
    try:
        name = codecs.lookup(encoding).name
    except LookupError:
        raise ValueError(f"--encoding {encoding!r} is unknown; give one such as utf-8, latin-1 or utf-16") from None
    before, texts_before = _encoding.set(name), _texts.set(tuple(texts))
    try:
        yield
    finally:
        _encoding.reset(before)
        _texts.reset(texts_before)


def encoding() -> str:
    """The encoding in which files of text are read."""
    return _encoding.get()


def table_options(texts: Sequence[str] = ()) -> dict[str, Any]:
    """Options of pandas' reader of tables: "NA" and "null" are texts as others are, and a spare field is no index.
    texts: columns whose fields stay as they are, next to those of [`reading_as`]."""
    kept = {"keep_default_na": False, "na_values": [""], "index_col": False}
    return {**kept, "converters": dict.fromkeys((*_texts.get(), *texts), _text)}


def _text(field: str) -> str | None:
    return field or None


def check_fields(path: Path, kind: str, *, column_names: Sequence[str] = (), quotes: bool = True) -> list[int]:
    """The lines at which the rows of a CSV or TSV file begin. The reader of tables itself takes spare fields for an
    index, and missing ones for empty ones.

    kind: csv or tsv. column_names: of a file without a header line. quotes: whether a field may stand in quotes.

    Raises ValueError for text that is not UTF-8, a line with more or fewer fields than the header, a quote without
    end, a column named twice, another delimiter, or no row.
    """
    delimiter = "\t" if kind == "tsv" else ","
    quoting = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    lines = decoded_lines(path)
    reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=quotes)  # type: ignore[arg-type]
    limit = csv.field_size_limit(_LONGEST_FIELD)
    header = list(column_names)
    starts: list[int] = []
    before = 0
    try:
        for fields in reader:
            start, before = before + 1, reader.line_num
            if not fields or (len(fields) == 1 and not fields[0].strip()):
                continue  # a blank line
            if not header:
                _check_header(path, fields, delimiter)
                header = fields
                continue
            if len(fields) != len(header):
                given = "--column_names names" if column_names else "the header names"
                remedy = f"quote a text that holds the delimiter {delimiter!r}, or correct" if quotes else "correct"
                raise ValueError(
                    f"line {start} of {str(path)!r} has {len(fields)} fields, and {given} {len(header)}"
                    f" ({', '.join(header)}); {remedy} the line"
                )
            starts.append(start)
    except csv.Error as error:
        if "new-line character" in str(error):
            raise ValueError(
                f"line {before + 1} of {str(path)!r} holds a lone carriage return (\\r), which some readers end a line"
                " at; save the file with \\n line ends"
            ) from error
        raise ValueError(
            f"{str(path)!r} could not be read as {encoding().upper()} {kind}: the row that begins at line {before + 1}"
            f" is malformed ({error}); close its quotes and double the quotes inside of them"
        ) from error
    finally:
        csv.field_size_limit(limit)
    if not starts:
        raise ValueError(f"{str(path)!r} has a header line and no rows; give a file that holds rows, or leave it out")
    return starts


def _check_header(path: Path, names: Sequence[str], delimiter: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        raise ValueError(
            f"the header of {str(path)!r} names the column {twice[0]!r} twice; give every column a name of its own"
        )
    other = next((mark for mark in _OTHER_DELIMITERS if mark != delimiter and mark in names[0]), None)
    if len(names) == 1 and other is not None:
        kind, own = ("TSV", "tabs") if delimiter == "\t" else ("CSV", "commas")
        remedy = "name it .tsv" if other == "\t" else "name it .csv" if other == "," else f"save it with {own}"
        raise ValueError(
            f"{str(path)!r} is read as {kind}, and its header {names[0]!r} holds {_OTHER_DELIMITERS[other]} but no"
            f" {own}; {remedy}"
        )


def decoded_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, perhaps compressed, with their ends (\\n alone ends one) and without a byte order
    mark.

    Raises ValueError for a line that is not UTF-8, with its number, and for a damaged compressed file.
    """
    with _open(path) as file:
        try:
            plain = encoding() == _UTF_8
            lines = file if plain else io.TextIOWrapper(file, encoding(), newline="\n")
            for number, line in enumerate(lines, start=1):
                text = _decoded(line, path, number) if plain else line
                yield text.removeprefix(_BOM) if number == 1 else text
        except UnicodeError as error:
            raise ValueError(f"{str(path)!r} cannot be read as {encoding()} ({error}); correct --encoding") from error
        except DAMAGED as error:
            raise ValueError(f"{str(path)!r} is a damaged {path.suffix} file ({error}); compress it again") from error


def _open(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise ValueError(
                f"{str(path)!r} is compressed by zstd, which needs the package zstandard: pip install zstandard"
            ) from None
        return io.BufferedReader(zstandard.open(path, "rb"))
    return _OPENERS.get(suffix, open)(path, "rb")


def _decoded(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"line {number} of {str(path)!r} is not UTF-8 (byte 0x{line[error.start]:02x}); name its encoding,"
            " as in --encoding latin-1, or convert the file"
        ) from error


def text_lines(path: Path) -> list[str]:
    """The lines of a text file without their ends (\\n or \\r\\n, no others) and without a byte order mark.

    Raises ValueError for a line that is not UTF-8, with its number.
    """
    return [line.removesuffix("\n").removesuffix("\r") for line in decoded_lines(path)]
