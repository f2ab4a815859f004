"""Reads a form (multipart/form-data, RFC 7578) as it comes: one file, whose bytes are handed on, and short fields."""

from __future__ import annotations

import unicodedata
from typing import Final

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from producers.errors import shown
from producers.gateway.http.errors import Problem, invalid_value, media_type

#: Longest field (bytes); and most parts of a form.
MAX_FIELD: Final = 4096
MAX_PARTS: Final = 32
#: Unicode's categories of characters that no name shows: control, format, surrogate, private, unassigned, line ends.
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
#: The part that is the file.
FILE: Final = "file"


class Form:
    """A form, fed with its bytes. Raises Problem for what is no form, or has parts that are too many or too long.

    `fields`: names and texts. `filename`: the file's, None before it comes. `ended`: the form is whole.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.ended = False
        self._file: list[bytes] = []
        self._parts = 0
        self._name = ""
        self._value = bytearray()
        self._header = bytearray()
        self._content = bytearray()
        self._disposition = b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                    "on_part_end": self._end,
                    "on_end": self._over,
                },
            )
        except FormParserError as error:
            raise _broken(str(error)) from None

    def feed(self, data: bytes) -> list[bytes]:
        """Take some of the form. Returns what there is in it of the file's bytes."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(str(error)) from None
        content, self._file = self._file, []
        return content

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        self._disposition = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._content)
        self._header.clear()
        self._content.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _broken("a part has no name")
        self._name = _text(options[b"name"], "a part's name")
        self._value.clear()
        if self._name in self.fields or (self._name == FILE and self.filename is not None):
            raise invalid_value(self._name, f"{shown(self._name)} comes twice.")
        if self._name == FILE:
            self.filename = base_name(_text(options.get(b"filename", b"upload"), "the file's name"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._file.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD:
            raise invalid_value(self._name, f"{shown(self._name)} has more than {MAX_FIELD} bytes.")

    def _end(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = _text(bytes(self._value), self._name)

    def _over(self) -> None:
        self.ended = True


def base_name(name: str) -> str:
    """A file's name without folders and without what no name shows: control and format characters, line ends.

    Whoever downloads the file may write it under this name.
    """
    base = name.replace("\\", "/").rpartition("/")[2]
    base = "".join(sign for sign in base if unicodedata.category(sign) not in _HIDDEN).strip()
    return "upload" if base in ("", ".", "..") else base


def form_of(request: Request) -> Form:
    """A form to feed with the request's body. Raises Problem for another kind of body."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        message = shown(request.headers.get("content-type", ""))
        message = f"The request must have the content type multipart/form-data, with a boundary; it has {message}."
        raise media_type(message, accept="multipart/form-data")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        message = f"The body has the content encoding {shown(coding)}; files are taken without one."
        raise media_type(message, accept_encoding="identity")
    return Form(options[b"boundary"])


def _text(data: bytes, subject: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _broken(f"{subject} is not UTF-8") from None


def _broken(why: str) -> Problem:
    return Problem(400, f"The body is no form (multipart/form-data): {why}.", code="invalid_form")
