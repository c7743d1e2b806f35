"""Recorded answers: what a real server answers today is what the default tests play back.

``STOKER_RIG_RECORD=1`` writes the recording anew.
"""

import asyncio
import json
import os
from pathlib import Path

from support.recording import Exchange, Recorder, read_recording
from support.source import ROOT
from support.vllm_calls import SECONDS_MAX
from support.vllm_scenario import Results, scenario
from support.vllm_server import Rig, Server

BYTES_MAX = 300_000


def folder(rig: Rig) -> Path:
    return ROOT / "tests" / "fixtures" / f"vllm-{rig.versions['vllm'].partition('+')[0]}"


def test_the_recorded_questions_are_those_of_today(main_server: Server, rig: Rig) -> None:
    async def main() -> tuple[Recorder, Results]:
        async with asyncio.timeout(SECONDS_MAX), Recorder(main_server.url) as recorder:
            return recorder, await scenario(recorder.url, recorder.begin)

    recorder, results = asyncio.run(main())
    place = folder(rig)
    if os.environ.get("STOKER_RIG_RECORD"):
        recorder.write(place)
        (place / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        assert sum(path.stat().st_size for path in place.iterdir()) < BYTES_MAX
    asked = {name: _questions(one) for name, one in recorder.chapters.items()}
    written = {name: _questions(one) for name, one in read_recording(place).items()}
    assert asked == written


def _questions(chapter: list[Exchange]) -> list[str]:
    return [one.question() for one in chapter]
