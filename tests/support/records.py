"""A run's record, for tests that need one."""

from stoker.coordinator.record import RunRecord
from stoker.model.ids import RunId

RECORD = RunRecord(
    run_id=RunId("run_1"), stoker_version="0", created=0.0, program="/p.py", program_name="p",
    program_version="1", program_digest="", model="sim:x", model_digest="", tasks_digest="",
    tasks_count=1, settings={}, settings_digest="",
)  # fmt: skip
