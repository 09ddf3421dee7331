"""Checks a YAML document against its sections, and describes what is wrong with it.

`loader` imports this lazily, with pydantic, so that `import tierstore` stays quick.
"""

import difflib
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tierstore.config.plain import plain_document
from tierstore.config.problems import PROBLEM_COUNT_MAX, key_path, problems_of
from tierstore.config.sections import (
    BreakerSection,
    Document,
    FaultSection,
    GpuSection,
    IntegritySection,
    IoSection,
    OffloadSection,
    PrimarySection,
    SecondarySection,
)
from tierstore.errors import ConfigError
from tierstore.quoting import named, quoted

__all__ = ["json_schema", "parse_document"]

_WORD_CHARS_MAX = 60
"""Characters of an unknown key that are compared with valid ones; the cost is quadratic."""


def json_schema() -> dict[str, object]:
    """Return the JSON Schema of the document."""
    schema = Document.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def parse_document(raw: object, *, is_python: bool) -> Document:
    """Check the keys of a document and the form of their values.

    `is_python`: the document comes from a program, so a bare number means bytes or seconds.

    Raises:
        ConfigError: one line per wrong key, and the number of those that are not listed.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected a mapping with 'primary', got {type(raw).__name__}")
    try:
        return Document.model_validate(plain_document(raw), context=is_python)
    except ValidationError as error:
        details = error.errors(include_url=False)
    except (ValueError, OverflowError) as error:  # the library itself failed on a value
        raise ConfigError(f"the mapping cannot be read: {named(error)}") from None
    shown = [_describe(detail) for detail in details[:PROBLEM_COUNT_MAX]]
    # Chained only to an exception from a plug-in's import, which shows where it was raised. The
    # library's own error is left out: its text quotes every wrong value, however large.
    raise problems_of(shown, len(details)) from _first_cause(details)


def _first_cause(details: Sequence[ErrorDetails]) -> BaseException | None:
    errors = (detail.get("ctx", {}).get("error") for detail in details)
    causes = (error.__cause__ for error in errors if isinstance(error, ValueError))
    return next(filter(None, causes), None)


def _describe(detail: ErrorDetails) -> str:
    location, got = detail["loc"], detail["input"]
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden" | "invalid_key":
            name = str(location[-1])[:_WORD_CHARS_MAX]
            text = "unknown key; " + _nearest(name, _valid_keys(location[:-1]))
        case "missing":
            text = "this key is required"
        case "model_type":
            text = f"expected a mapping, got {quoted(got)}"
        case "literal_error":
            text = f"expected {context['expected']}, got {quoted(got)}"
        case "too_long":
            text = f"expected at most {context['max_length']} items, got {context['actual_length']}"
        case "value_error":
            text = str(context["error"])
        case _:
            message = detail["msg"].removeprefix("Input").removeprefix("String")
            text = f"must{message.removeprefix(' should')}, got {quoted(got)}"
    return f"{key_path(location)}: {text}"


_SECTIONS: dict[str, type[BaseModel]] = {
    "primary": PrimarySection,
    "secondary": SecondarySection,
    "io": IoSection,
    "integrity": IntegritySection,
    "breaker": BreakerSection,
    "faults": FaultSection,
    "offload": OffloadSection,
    "gpu": GpuSection,
}


def _valid_keys(location: Sequence[str | int]) -> list[str]:
    section: type[BaseModel] = Document
    for part in location:
        if isinstance(part, str):
            section = _SECTIONS[part]
    return list(section.model_fields)


def _nearest(name: str, valid: list[str]) -> str:
    nearest = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'? " if nearest else ""
    return f"{hint}valid keys are {', '.join(valid)}"
