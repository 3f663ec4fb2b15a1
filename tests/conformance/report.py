"""The verdicts of a run by family, and its most frequent failures."""

from __future__ import annotations

from typing import Any

OUTCOMES = ("passed", "failed", "skipped", "waived")


def summarise(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Entries of the pytest plugin, by node id, as totals, one row a family, and a ranking of failures."""
    families: dict[str, dict[str, Any]] = {}
    failures: dict[str, list[tuple[str, str]]] = {}
    for node, entry in entries.items():
        _, *names = node.split("::")
        family = names[0].removeprefix("Test_") if names else "collection"
        test = names[-1] if names else node
        outcome = entry["outcome"] or "failed"  # none at all: its process died
        if outcome == "skipped" and "WAIVED" in entry.get("reason", ""):
            outcome = "waived"
        row = families.setdefault(family, {**dict.fromkeys(OUTCOMES, 0), "seconds": 0.0, "tests": {}})
        row[outcome] += 1
        row["seconds"] = round(row["seconds"] + entry["seconds"], 2)
        details = {key: entry[key] for key in ("errors", "reason") if entry.get(key)}
        row["tests"][test] = {"outcome": outcome, "seconds": round(entry["seconds"], 2), **details}
        if outcome == "failed":
            errors = entry["errors"]
            failures.setdefault(test, []).append((family, errors[0]["message"] if errors else "its process died"))
    ranking = sorted(failures.items(), key=lambda item: (-len(item[1]), item[0]))
    return {
        "totals": {outcome: sum(row[outcome] for row in families.values()) for outcome in OUTCOMES},
        "families": dict(sorted(families.items())),
        "failures": [
            {"test": test, "families": [family for family, _ in where], "error": where[0][1]}
            for test, where in ranking
        ],
    }


def print_report(report: dict[str, Any]) -> None:
    width = max(10, *(len(name) for name in report["families"]))
    print(f"transformers {report['transformers']}, {report['seconds']} s")
    print(f"{'family':<{width}} " + " ".join(f"{name:>8}" for name in (*OUTCOMES, "seconds")))
    for name, row in report["families"].items():
        print(f"{name:<{width}} " + " ".join(f"{row[key]:>8}" for key in OUTCOMES) + f" {row['seconds']:>8.1f}")
    print(f"{'all':<{width}} " + " ".join(f"{report['totals'][key]:>8}" for key in OUTCOMES))
    if report["failures"]:
        print("\nfailures, most frequent first")
    for item in report["failures"][:40]:
        names = ", ".join(item["families"][:4]) + (", ..." if len(item["families"]) > 4 else "")
        print(f"{len(item['families']):>4}  {item['test']}  [{names}]\n      {item['error'][:220]}")
