"""Deliberate defects of the core, each a few lines: the simulation must notice every one.

A defect is a function that patches the classes; its name says what is wrong. They stand for the
mistakes one really makes here: an order swapped, a case forgotten, a failure believed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest import MonkeyPatch

from worldpager.pager import core as core_module
from worldpager.pager import events as ev
from worldpager.pager.core import Core
from worldpager.pager.room import Room
from worldpager.pager.spill import Spill
from worldpager.pager.states import TRANSITIONS, Page, State
from worldpager.pager.table import PageTable

Mutation = Callable[[MonkeyPatch], None]
MUTATIONS: list[Mutation] = []


def mutation(function: Mutation) -> Mutation:
    MUTATIONS.append(function)
    return function


def _after(patch: MonkeyPatch, owner: type, name: str, then: Callable[..., Any]) -> None:
    """Let ``then(self, result, *args)`` run after the method; its value becomes the result."""
    method = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *a, **k: then(self, method(self, *a, **k), *a, **k))


# ---- bytes ---------------------------------------------------------------------------------------


@mutation
def indexed_before_its_bytes_are_complete(patch: MonkeyPatch) -> None:
    commit = Core._commit

    def at_once(core: Core, _: None, event: ev.Reserve) -> None:
        for action in core._out:
            if isinstance(action, ev.Granted):
                commit(core, ev.Commit(action.key, action.generation))

    _after(patch, Core, "_reserve", at_once)
    patch.setattr(Core, "_commit", lambda core, event: None)


@mutation
def slot_freed_before_its_write_is_done(patch: MonkeyPatch) -> None:
    move = PageTable.move

    def free_early(table: PageTable, page: Page, step: str) -> None:
        move(table, page, step)
        if step == "write":
            table.let_go(page)
            table.hold(page, table.extents.allocate(page.nbytes) or 0)  # another one, or the first

    patch.setattr(PageTable, "move", free_early)


@mutation
def pinned_pages_may_be_evicted(patch: MonkeyPatch) -> None:
    patch.setattr(Room, "_spare", lambda room, state: room._table.current(state))


@mutation
def pins_end_as_soon_as_the_window_is_served(patch: MonkeyPatch) -> None:
    def unpin(core: Core, _: None, stream: Any, event: ev.Boundary, *rest: Any) -> None:
        for page in stream.pinned:
            page.pins -= 1
        stream.pinned = []

    _after(patch, Core, "_serve", unpin)


@mutation
def superseded_page_freed_while_in_use(patch: MonkeyPatch) -> None:
    patch.setattr(PageTable, "settle", lambda table, page: table.let_go(page))


@mutation
def evicted_while_staged(patch: MonkeyPatch) -> None:
    patch.setattr(Room, "unstage", lambda room, page: None)


# ---- what is believed ----------------------------------------------------------------------------


@mutation
def failed_write_counted_as_success(patch: MonkeyPatch) -> None:
    patch.setattr(
        Spill, "write_failed",
        lambda spill, event: spill.write_done(ev.WriteDone(event.key, event.generation)),
    )  # fmt: skip


@mutation
def failed_read_counted_as_success(patch: MonkeyPatch) -> None:
    patch.setattr(
        Core, "_read_failed",
        lambda core, event: core._read_done(ev.ReadDone(event.key, event.generation)),
    )  # fmt: skip


@mutation
def failed_delete_counted_as_success(patch: MonkeyPatch) -> None:
    patch.setattr(Spill, "delete_failed", Spill.delete_done)


@mutation
def late_read_of_an_older_generation_accepted(patch: MonkeyPatch) -> None:
    read_done = Core._read_done

    def believe(core: Core, event: ev.ReadDone) -> None:
        newer = core.table.pages.get(event.key)
        page = core.table.held(event.key, event.generation)
        read_done(core, event)
        if page is not None and newer not in (None, page):
            core.table.pages[event.key] = page

    patch.setattr(Core, "_read_done", believe)


@mutation
def stale_window_not_flagged(patch: MonkeyPatch) -> None:
    serve = Core._serve
    patch.setattr(Core, "_serve", lambda core, stream, event, window, reason: serve(
        core, stream, event, window, ""))  # fmt: skip


@mutation
def flush_answered_before_the_writes(patch: MonkeyPatch) -> None:
    def at_once(spill: Spill, _: None, event: ev.Flush) -> None:
        for page in spill._table.resident():
            page.flushing = False
        spill._check_flush()

    _after(patch, Spill, "flush", at_once)


# ---- what is lost or left ------------------------------------------------------------------------


@mutation
def dirty_page_evicted_without_a_write(patch: MonkeyPatch) -> None:
    patch.setitem(TRANSITIONS, (State.DIRTY, "evict"), State.STORED)
    spare = Room._spare
    patch.setattr(
        Room, "_spare",
        lambda room, state: spare(room, state) or spare(room, State.DIRTY),
    )  # fmt: skip


@mutation
def chunk_dropped_in_silence(patch: MonkeyPatch) -> None:
    def silence(core: Core, _: None, event: ev.Reserve) -> None:
        core._out = [action for action in core._out if not isinstance(action, ev.Lost)]

    _after(patch, Core, "_reserve", silence)


@mutation
def older_file_outlives_the_lost_chunk(patch: MonkeyPatch) -> None:
    patch.setattr(Spill, "clear", lambda spill, key: None)


@mutation
def older_file_deleted_before_it_is_replaced(patch: MonkeyPatch) -> None:
    def at_once(spill: Spill, key: Any, generation: int) -> None:
        spill._busy.add(key)
        spill._emit(ev.Delete(key, generation))

    patch.setattr(Spill, "outdated", at_once)


@mutation
def failed_write_believed_to_have_left_no_file(patch: MonkeyPatch) -> None:
    def forget(spill: Spill, _: None, event: ev.WriteFailed) -> None:
        if event.key not in spill._busy:
            spill._outdated.pop(event.key, None)

    _after(patch, Spill, "write_failed", forget)


@mutation
def newer_write_begun_before_the_older_one_has_ended(patch: MonkeyPatch) -> None:
    _after(patch, Spill, "_write", lambda spill, _, page: spill._busy.discard(page.key))


@mutation
def flush_forgets_a_chunk_written_again(patch: MonkeyPatch) -> None:
    def forget(core: Core, _: None, old: Page, page: Page) -> None:
        page.flushing = False
        core._spill._check_flush()

    _after(patch, Core, "_supersede", forget)


@mutation
def rewritten_while_the_old_file_is_being_deleted(patch: MonkeyPatch) -> None:
    _after(patch, Spill, "clear", lambda spill, _, key: spill._busy.discard(key))


@mutation
def generations_start_again_after_a_restart(patch: MonkeyPatch) -> None:
    def forget(core: Core, _: None, event: ev.Adopt) -> None:
        core._generation = 0

    _after(patch, Core, "_adopt", forget)


# ---- progress ------------------------------------------------------------------------------------


@mutation
def reads_retried_for_ever(patch: MonkeyPatch) -> None:
    patch.setattr(core_module, "READ_ATTEMPTS", 10**9)


@mutation
def reads_retried_at_once(patch: MonkeyPatch) -> None:
    patch.setattr(core_module, "backoff", lambda attempts: 0)


@mutation
def rewritten_chunk_loses_its_rank_but_stays_listed(patch: MonkeyPatch) -> None:
    def unrank(core: Core, _: None, event: ev.Commit) -> None:
        core.table.pages[event.key].rank = None

    def list_all(core: Core, order: list[Any]) -> list[Any]:
        listed = [p for s in core._streams.values() for p in core._pages(s.ahead)]
        return order + [(p, 0) for p in listed if p.rank is None and p.state is State.STORED]

    _after(patch, Core, "_commit", unrank)
    _after(patch, Core, "_load_order", list_all)


@mutation
def blocked_commit_does_not_start_a_write(patch: MonkeyPatch) -> None:
    def forget(core: Core, _: None, event: ev.Reserve) -> None:
        core._blocked = False

    _after(patch, Core, "_reserve", forget)


@mutation
def starved_window_does_not_start_a_write(patch: MonkeyPatch) -> None:
    def forget(core: Core, _: None) -> None:
        core._starved = None

    _after(patch, Core, "_start_reads", forget)


@mutation
def window_waits_for_what_no_room_can_hold(patch: MonkeyPatch) -> None:
    patch.setattr(Core, "_cannot_load", lambda core, stream: False)


@mutation
def waiters_not_told_of_released_windows(patch: MonkeyPatch) -> None:
    def quiet(core: Core, _: None, *rest: Any) -> None:
        core._out = [action for action in core._out if not isinstance(action, ev.Progress)]

    _after(patch, Core, "_serve", quiet)


@mutation
def trouble_reported_at_every_failure(patch: MonkeyPatch) -> None:
    _after(patch, Spill, "write_failed",
           lambda spill, _, event: spill._emit(ev.Health(event.reason)))  # fmt: skip


@mutation
def chunks_dropped_although_it_makes_no_room(patch: MonkeyPatch) -> None:
    patch.setattr(PageTable, "fits_without", lambda table, leaving, nbytes: bool(leaving))
