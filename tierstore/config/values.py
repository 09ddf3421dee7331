"""The values of a configuration as pydantic reads them: sizes, durations and paths."""

import os
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema

from tierstore.config.key_file import looks_like_key
from tierstore.config.plug_ins import (
    BUILT_IN_NAMES,
    PLUG_IN_NAME_PATTERN,
    PlugInGroup,
    find_plug_in,
)
from tierstore.config.units import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size
from tierstore.quoting import quoted

__all__ = [
    "AdmissionName",
    "BackendName",
    "Duration",
    "KeyPathText",
    "Options",
    "PathText",
    "PolicyName",
    "PositiveSize",
    "Size",
    "TierName",
    "VersionNumber",
]


def _schema(pattern: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [example]})


def _is_python(info: ValidationInfo) -> bool:
    """Return whether the document comes from a program, so that bare numbers are allowed."""
    return bool(info.context)


def _size(raw: object, info: ValidationInfo) -> int:
    return parse_size(raw, is_python=_is_python(info))


def _duration(raw: object, info: ValidationInfo) -> float:
    return parse_duration(raw, is_python=_is_python(info))


def _path_text(raw: object) -> object:
    text = str(raw) if isinstance(raw, Path) else raw
    if not isinstance(text, str):
        return text
    too_long = (
        f"expected names of at most {_NAME_BYTES_MAX} bytes, and {_PATH_BYTES_MAX} in all, "
        f"got {quoted(text)}"
    )
    if len(text) > _PATH_BYTES_MAX:
        raise ValueError(too_long)
    if "\0" in text:
        raise ValueError(f"a path has no zero bytes, got {quoted(text)}")
    if any(unicodedata.category(char) in _UNPRINTED for char in text):
        raise ValueError(f"a path has no line breaks or control characters: {quoted(text)}")
    try:
        whole = Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{quoted(text)} names an unknown home; give an absolute path") from None
    longest = max((len(os.fsencode(part)) for part in whole.parts), default=0)
    if longest > _NAME_BYTES_MAX or len(os.fsencode(whole)) > _PATH_BYTES_MAX:
        raise ValueError(too_long)
    if len(whole.parts) > _NAME_COUNT_MAX:
        raise ValueError(f"expected at most {_NAME_COUNT_MAX} folders, got {quoted(text)}")
    return text


def _version(raw: object) -> object:
    # In Python, and in pydantic's check of a literal, `true` and `1.0` are equal to 1.
    if type(raw) is not int:
        raise ValueError(f"expected 1, got {quoted(raw)}")
    return raw


def _key_path(raw: object) -> object:
    """Refuse a key in the place of its file, without quoting it."""
    if not isinstance(raw, str | os.PathLike):
        raise ValueError("expected the path of a file")  # noqa: TRY004 - pydantic asks for it
    if looks_like_key(str(raw)):
        raise ValueError("this is a key; write it to a file, and give the path of that file")
    return _path_text(raw)


def _plug_in_name(group: PlugInGroup) -> BeforeValidator:
    """Accept the built-in names of a group, and the names of plug-ins that can be imported."""

    def check(raw: object) -> object:
        if raw not in BUILT_IN_NAMES[group]:
            find_plug_in(group, raw)
        return raw

    return BeforeValidator(check)


def _plug_in_schema(group: PlugInGroup) -> WithJsonSchema:
    """Describe the names so that an editor offers the built-in ones."""
    names = list(BUILT_IN_NAMES[group])
    return WithJsonSchema(
        {"anyOf": [{"enum": names}, {"type": "string", "pattern": PLUG_IN_NAME_PATTERN}]}
    )


_UNPRINTED = ("Cc", "Zl", "Zp")
_NAME_BYTES_MAX = 255
_NAME_COUNT_MAX = 100
_PATH_BYTES_MAX = 3_500
"""The kernel's limit is 4,096; a tier appends its own file names to its path."""
Size = Annotated[int, BeforeValidator(_size), _schema(SIZE_PATTERN, "20GiB")]
PositiveSize = Annotated[Size, Field(gt=0)]
Duration = Annotated[float, BeforeValidator(_duration), _schema(DURATION_PATTERN, "2s")]
PathText = Annotated[str, BeforeValidator(_path_text)]
PolicyName = Annotated[
    str, _plug_in_name(PlugInGroup.POLICIES), _plug_in_schema(PlugInGroup.POLICIES)
]
AdmissionName = Annotated[
    str, _plug_in_name(PlugInGroup.ADMISSIONS), _plug_in_schema(PlugInGroup.ADMISSIONS)
]
BackendName = Annotated[
    str, _plug_in_name(PlugInGroup.BACKENDS), _plug_in_schema(PlugInGroup.BACKENDS)
]
TierName = Annotated[str, _plug_in_name(PlugInGroup.TIERS), _plug_in_schema(PlugInGroup.TIERS)]
Options = dict[str, Any]
KeyPathText = Annotated[str, BeforeValidator(_key_path)]
VersionNumber = Annotated[Literal[1], BeforeValidator(_version)]
