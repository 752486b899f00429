"""Which recorded steps are meant: as in schemas.steps, which importers read as well."""

from __future__ import annotations

from ..schemas.steps import ALL_STEPS, FORMS, parse_steps, select_steps

__all__ = ["ALL_STEPS", "FORMS", "parse_steps", "select_steps"]
