"""Parses bodies of the type multipart/form-data, which clients send to upload files.

Source: RFC 7578.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser

from bmforge.serve.errors import RequestError

__all__ = ["FormPart", "parse_form"]

_TYPE = "multipart/form-data"
_MOST_PARTS = 64
_MOST_HEAD_BYTES = 8192


@dataclass(frozen=True)
class FormPart:
    """Field of a form.

    Args:
        name: name of the field.
        value: contents.
        filename: name of the uploaded file; None for other fields.
    """

    name: str
    value: bytes
    filename: str | None = None


def parse_form(body: bytes, content_type: str) -> list[FormPart]:
    """Return the fields of a form in order.

    Args:
        body: body of the request.
        content_type: header Content-Type with the boundary.

    Raises:
        RequestError: the body is not a complete form.
    """
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary() if header.get_content_type() == _TYPE else None
    if not boundary:
        raise RequestError(
            f"the content type {content_type[:80]!r} is not supported (needed: {_TYPE} with a "
            "boundary). Send the file as a form.",
            status=415,
        )
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    first, *pieces = (b"\r\n" + body).split(delimiter, _MOST_PARTS + 1)
    if not pieces or first.strip() or not pieces[-1].startswith(b"--"):
        raise RequestError(
            f"the form is incomplete, or has more than {_MOST_PARTS} fields. Send fewer fields, "
            "and end the form with the boundary."
        )
    return [_parse_part(piece) for piece in pieces[:-1]]


def _parse_part(piece: bytes) -> FormPart:
    head, separator, value = piece.partition(b"\r\n\r\n")
    if not separator or len(head) > _MOST_HEAD_BYTES:
        raise RequestError(
            "a field of the form has no header, or its header is too long. Send the header "
            "content-disposition with the name of the field."
        )
    headers = BytesHeaderParser().parsebytes(head.lstrip(b"\r\n") + b"\r\n\r\n")
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise RequestError(
            "a field of the form has no name. Add name=... to its header content-disposition."
        )
    return FormPart(name, value, headers.get_filename())
