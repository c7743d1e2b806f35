"""What every group of settings is made of."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
