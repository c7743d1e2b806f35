"""A copy or a compaction of a living ledger that meets a full disk, or its owner's death."""

import asyncio
import signal
from pathlib import Path
from typing import cast

import pytest

from stoker.broker.base import LedgerLimits
from stoker.broker.checking import check_database
from stoker.broker.copying import copy_database, mark
from stoker.broker.operating import CompactReply, CopyReply, CopyRequest
from stoker.broker.place import DATABASE
from stoker.broker.verbs import LedgerVerbs
from stoker.errors import LedgerRefused, LedgerStorageFailed
from support.ledger import BOUND_SECONDS, Harness, act, action
from support.ledger_process import end_owners, start_owner, wait_for_end, wait_until_published


@pytest.mark.parametrize("what", ["kill", "disk_full"])
@pytest.mark.parametrize("point", ["maintain.copy", "maintain.compact"])
def test_b12_maintenance_that_fails_leaves_the_ledger_as_it_was(
    point: str, what: str, tmp_path: Path
) -> None:
    place = tmp_path / "ledger"
    place.mkdir()
    owner = start_owner(place, f"{point}={what}")
    wait_until_published(place, owner)

    async def asked(h: Harness, target: Path) -> CopyReply | CompactReply:
        verbs = cast("LedgerVerbs", h.ledger)
        if point == "maintain.compact":
            return await verbs.compact()
        return await verbs.copy_some(CopyRequest(path=str(target), pages=10**6))

    async def scenario(h: Harness) -> None:
        await h.submit(action(1), action(2))
        await h.complete(*await h.lease(slots=1))
        refusal = LedgerStorageFailed if point == "maintain.compact" else LedgerRefused
        if what == "disk_full":
            with pytest.raises(refusal):
                await asked(h, tmp_path / "half.db")
            assert owner.poll() is None, "the owner lives"
        else:
            try:  # the next owner is asked again: it does it, or finds a part of the copy
                await asked(h, tmp_path / "half.db")
            except LedgerRefused:
                assert point == "maintain.copy"
            assert wait_for_end(owner) == -signal.SIGKILL, f"{point} was never reached"
        await asked(h, tmp_path / "whole.db")
        assert list(await h.completed()) == [act(1)]
        [lease] = await h.lease()
        assert lease.action.action_id == act(2)
        await copy_database(place, tmp_path / "copy.db")

    async def whole() -> None:
        h = Harness("owner", place, LedgerLimits())
        await h.open()
        try:
            async with asyncio.timeout(BOUND_SECONDS):
                await h.attach()
                await h.enroll()
                await scenario(h)
        finally:
            await h.close()

    try:
        asyncio.run(whole())
    finally:
        end_owners()
    mark(tmp_path / "copy.db")
    assert check_database(tmp_path / "copy.db").problems == []
    assert (place / DATABASE).exists()
