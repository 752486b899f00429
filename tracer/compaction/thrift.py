"""Reading and writing Thrift's compact protocol, of which Parquet footers are made, without a schema.

https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
"""

from __future__ import annotations

from typing import Any

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)
_LONG_LIST, _MAX_DELTA = 15, 15

Struct = dict[int, tuple[int, Any]]
"""Field number -> type and value; a list is the element type and the elements."""


def read_struct(content: bytes) -> Struct:
    """Read the structure at the beginning of `content`. Raises ValueError."""
    try:
        return _Reader(content).struct()
    except IndexError as error:
        raise ValueError("it ends within a value") from error


def write_struct(fields: Struct) -> bytes:
    """Encode a structure."""
    target = bytearray()
    _put_struct(target, fields)
    return bytes(target)


class _Reader:
    def __init__(self, content: bytes):
        self._content, self._at = content, 0

    def struct(self) -> Struct:
        found: Struct = {}
        number = 0
        while header := self._byte():
            number = number + (header >> 4) if header >> 4 else _unfolded(self._varint())
            kind = header & 15
            found[number] = kind, (kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind))
        return found

    def _value(self, kind: int) -> Any:
        if kind in (_TRUE, _FALSE, _BYTE):  # in a list, a bool is a byte
            return self._byte()
        if kind in _INTEGERS:
            return _unfolded(self._varint())
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in (_LIST, _SET):
            header = self._byte()
            size = header >> 4 if header >> 4 < _LONG_LIST else self._varint()
            return header & 15, [self._value(header & 15) for _ in range(size)]
        if kind == _STRUCT:
            return self.struct()
        raise ValueError(f"it holds a value of type {kind}")

    def _byte(self) -> int:
        self._at += 1
        return self._content[self._at - 1]

    def _bytes(self, size: int) -> bytes:
        self._at += size
        if self._at > len(self._content):
            raise IndexError
        return self._content[self._at - size : self._at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7


def _put_struct(target: bytearray, fields: Struct) -> None:
    before = 0
    for number, (kind, value) in sorted(fields.items()):
        if 0 < number - before <= _MAX_DELTA:
            target.append((number - before) << 4 | kind)
        else:
            target.append(kind)
            _put_varint(target, _folded(number))
        before = number
        if kind not in (_TRUE, _FALSE):
            _put_value(target, kind, value)
    target.append(0)


def _put_value(target: bytearray, kind: int, value: Any) -> None:
    if kind in (_TRUE, _FALSE, _BYTE):
        target.append(value)
    elif kind in _INTEGERS:
        _put_varint(target, _folded(value))
    elif kind == _DOUBLE:
        target += value
    elif kind == _BINARY:
        _put_varint(target, len(value))
        target += value
    elif kind in (_LIST, _SET):
        of, values = value
        if len(values) < _LONG_LIST:
            target.append(len(values) << 4 | of)
        else:
            target.append(_LONG_LIST << 4 | of)
            _put_varint(target, len(values))
        for item in values:
            _put_value(target, of, item)
    else:
        _put_struct(target, value)


def _put_varint(target: bytearray, value: int) -> None:
    while value > 127:
        target.append(value & 127 | 128)
        value >>= 7
    target.append(value)


def _folded(value: int) -> int:
    """Zigzag: 0, -1, 1, -2, ... are 0, 1, 2, 3, ..."""
    return value << 1 if value >= 0 else -value * 2 - 1


def _unfolded(value: int) -> int:
    return -(value >> 1) - 1 if value & 1 else value >> 1
