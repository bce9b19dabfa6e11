"""``k31 check --lock``: a model held against its fusion contract."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from k31compile.cli import console, target
from k31compile.cli.explain import explained_graphs, made_with
from k31compile.errors import ContractError, LockError

if TYPE_CHECKING:
    from k31compile.contract.compare import Verdict
    from k31compile.contract.lockfile import Contract
    from k31compile.entry import Entry


def check_lock(target_name: str, lock: Path, dtype: str | None, layers: int | None) -> int:
    """Compile each entry, compare it with the contract, and print one line for each thing that is missing.

    Raises:
        LockError: the contract cannot be read, or is another model's.
        ContractError: something is missing (the exit code says so where JSON was asked for).
    """
    from k31compile.contract.lockfile import read_contract

    contract = read_contract(lock)
    entries = target.load_entries(target_name, dtype, layers)
    _require_known(contract, entries, lock)
    verdicts = []
    with console.progress("check", len(entries)) as advance:
        for entry in entries:
            advance(entry.name)
            verdicts.append((entry.name, _judged(contract, entry)))
    missing = [line for _, verdict in verdicts for line in verdict.lines()]
    notes = [*_other_versions(contract), *(f"{name}: {note}" for name, verdict in verdicts for note in verdict.notes)]
    data: dict[str, Any] = {"target": target_name, "lock": str(lock), "ok": not missing, "notes": notes}
    data["entries"] = {name: verdict.to_dict() for name, verdict in verdicts}
    renew = f"k31 explain {target_name} --lock {lock}"
    console.emit(data, lambda out: _render(missing, notes, f"{lock}: {_summary(verdicts, missing)}", renew, out))
    if missing and not console.json_wanted():
        count = "1 promise of the contract is" if len(missing) == 1 else f"{len(missing)} promises of the contract are"
        raise ContractError(f"{count} not kept", str(lock), f"if that was meant, renew it: {renew}")
    return 1 if missing else 0


def _require_known(contract: Contract, entries: list[Entry], lock: Path) -> None:
    for entry in entries:
        if entry.name not in contract.entries():
            known = ", ".join(contract.entries())
            raise LockError(
                f"the contract is for {contract.target} with the entries {known}, and has no {entry.name!r}", str(lock)
            )


def _judged(contract: Contract, entry: Entry) -> Verdict:
    from k31compile.contract.compare import compare

    report, graphs = explained_graphs(entry)
    return compare(contract.of_entry(entry.name), graphs, report)


def _other_versions(contract: Contract) -> list[str]:
    now = made_with()
    return [
        f"the contract was written with {name} {version}, here is {now.get(name, 'none')}"
        for name, version in contract.versions.items()
        if now.get(name) != version
    ]


def _summary(verdicts: list[tuple[str, Verdict]], missing: list[str]) -> str:
    entries = "1 entry" if len(verdicts) == 1 else f"{len(verdicts)} entries"
    return f"{entries} compared, " + (f"{len(missing)} promises not kept" if missing else "every promise is kept")


def _render(missing: list[str], notes: list[str], summary: str, renew: str, out: Console) -> None:
    for line in missing:
        out.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    for note in notes:
        out.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    out.print(summary, markup=False, highlight=False, soft_wrap=True)
    if any("gained" in note for note in notes):
        out.print(f"to hold what was gained as well, renew it: {renew}", markup=False, highlight=False, soft_wrap=True)
