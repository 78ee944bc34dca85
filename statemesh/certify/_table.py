"""The table as a file of JSON and as a page, and what differs between two of them."""

import html
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ._cells import AROUND, COLUMNS, MAPS, MODES, TYPE
from ._run import Judged, Outcome


# What stands in the file for an outcome, the worst last. A cell has the worst of all ways to split operands.
SIGNS: dict[Outcome, str] = {
    "none": "-",
    "right": ".",
    "refused": "r",
    "raw": "e",
    "wrong": "W",
    "unconfirmed": "?",
}
_ORDER = "".join(SIGNS.values())

PLACES = [
    (mode, column)
    for mode in MODES
    for column in [*COLUMNS, AROUND, TYPE]
    if mode in MAPS or column not in ("lanes", AROUND, TYPE)
    if (mode, column) != ("unchecked", TYPE)
]

# The rows of a table: the line, a sign for each place, and what is said of those that are not right.
Rows = dict[str, dict[str, Any]]


def table_row(line: str, cells: list[Judged], programs: Mapping[Judged, str]) -> dict[str, Any]:
    """A row as the file has it.

    **Arguments:**

    - `programs`: the files that show wrong cells.
    """
    signs, notes = "", {}
    for mode, column in PLACES:
        here = [cell for cell in cells if (cell.mode, cell.column) == (mode, column)]
        worst = max(here, key=lambda cell: _ORDER.index(SIGNS[cell.outcome]), default=None)
        sign = "-" if worst is None else SIGNS[worst.outcome]
        signs += sign
        if worst is not None and sign not in "-.":
            note = [worst.split, worst.says]
            notes[f"{mode} {column}"] = [*note, programs[worst]] if worst in programs else note
    return {"line": line, "signs": signs, "notes": notes}


def as_text(table: dict[str, Any]) -> str:
    """JSON with a line for each row."""
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table["rows"].items()]
    head = json.dumps({key: x for key, x in table.items() if key != "rows"}, indent=2)
    return head.removesuffix("\n}") + ',\n"rows": {\n' + ",\n".join(lines) + "\n}}\n"


def counts(rows: Rows, modes: tuple[str, ...] = MODES) -> dict[Outcome, int]:
    """How many cells have each outcome."""
    at = [k for k, (mode, _) in enumerate(PLACES) if mode in modes]
    found = Counter(row["signs"][k] for row in rows.values() for k in at)
    return {outcome: found[sign] for outcome, sign in SIGNS.items()}


def differences(old: Rows, new: Rows) -> Iterator[tuple[str, str, str, Outcome, Outcome]]:
    """The cells in which two tables differ: row, mode, column, and both outcomes."""
    names = {sign: outcome for outcome, sign in SIGNS.items()}
    for name in sorted(old.keys() & new.keys()):
        pairs = zip(PLACES, old[name]["signs"], new[name]["signs"], strict=True)
        for (mode, column), before, after in pairs:
            if before != after:
                yield name, mode, column, names[before], names[after]


def page(tables: list[dict[str, Any]]) -> str:
    """A page with the tables of one or several versions of JAX, which needs no other file."""
    data = json.dumps(tables, separators=(",", ":")).replace("</", "<\\/")
    places = json.dumps(PLACES)
    head = "".join(
        f'<th colspan="{sum(m == mode for m, _ in PLACES)}">{html.escape(mode)}</th>'
        for mode in MODES
    )
    columns = "".join(f"<th><span>{html.escape(column)}</span></th>" for _, column in PLACES)
    return (
        _PAGE.replace("DATA", data)
        .replace("PLACES", places)
        .replace("HEAD", head)
        .replace("COLUMNS", columns)
    )


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>What is right when sharded</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 1em; color: #222; background: #fff }
table { border-collapse: collapse } th { font-weight: 600; background: #fff }
thead { position: sticky; top: 0 } thead span { writing-mode: vertical-rl; font-weight: 400 }
td { border: 1px solid #eee; padding: 0 }
td.name { padding: 1px 6px; font-family: monospace; white-space: nowrap }
td.cell { width: 20px; height: 18px; text-align: center; cursor: default }
.none { background: #fff } .right { background: #bfe5bf } .refused { background: #cfdcf5 }
.raw { background: #f7dfa3 } .wrong, .unconfirmed { background: #e77; font-weight: bold }
label { margin-right: 1em } #says { white-space: pre-wrap; min-height: 4.5em; font-family: monospace }
.key { padding: 0 6px; margin-right: 4px }
</style>
<p>
  <label>JAX <select id="version"></select></label>
  <label>function <input id="filter" placeholder="jax.numpy"></label>
  <label>only rows with <select id="only">
    <option value="">anything</option>
    <option>wrong</option><option>raw</option><option>refused</option>
  </select></label>
  <label>in <select id="mode"></select></label>
  <label><input type="checkbox" id="differ"> that differs from the other version</label>
</p>
<p><span class="key right">right</span><span class="key refused">refused in clear words</span>
<span class="key raw">raw error</span><span class="key wrong">wrong in silence</span>
<span class="key none">no such thing</span> <span id="count"></span></p>
<p id="says">Point at a cell. A click on a wrong one opens the program that shows it.</p>
<table><thead><tr><th></th>HEAD</tr><tr><th></th>COLUMNS</tr></thead><tbody id="rows"></tbody></table>
<p>Functions without a row: they make no arrays, or take something else: <code id="untried"></code></p>
<p>Primitives of <code>jax.lax</code> that no row reaches: <code id="unreached"></code></p>
<script>
const tables = DATA, places = PLACES;
const names = {"-": "none", ".": "right", r: "refused", e: "raw", W: "wrong", "?": "unconfirmed"};
const get = id => document.getElementById(id);
for (const [k, t] of tables.entries()) get("version").add(new Option(t.jax, k));
for (const mode of ["any mode", ...new Set(places.map(p => p[0]))]) get("mode").add(new Option(mode));
function draw() {
  const table = tables[get("version").value], other = tables.find(t => t !== table);
  const text = get("filter").value, only = get("only").value, mode = get("mode").value;
  let html = "", count = 0;
  for (const [name, row] of Object.entries(table.rows)) {
    if (!name.includes(text)) continue;
    const counted = [...row.signs].map((sign, k) => [names[sign], k]).filter(([outcome, k]) =>
      (mode === "any mode" || places[k][0] === mode) && (!only || outcome === only) &&
      (!get("differ").checked || other?.rows[name] && other.rows[name].signs[k] !== row.signs[k]));
    if (!counted.length) continue;
    count++;
    html += `<tr><td class="name" title="${row.line.replaceAll('"', "&quot;")}">${name}</td>`;
    html += [...row.signs].map((sign, k) =>
      `<td class="cell ${names[sign]}" data-name="${name}" data-place="${k}"></td>`).join("") + "</tr>";
  }
  get("rows").innerHTML = html;
  for (const kind of ["untried", "unreached"]) get(kind).textContent = table[kind].join(", ");
  get("count").textContent = `${count} functions`;
}
function note(cell) {
  const row = tables[get("version").value].rows[cell.dataset.name];
  const [mode, column] = places[cell.dataset.place];
  return [row, mode, column, row.notes[`${mode} ${column}`] || []];
}
get("rows").onmouseover = event => {
  if (!event.target.dataset.name) return;
  const [row, mode, column, [split, says]] = note(event.target);
  get("says").textContent = `${event.target.dataset.name}, called as ${row.line}\\n${mode}, ${column}: ` +
    names[row.signs[event.target.dataset.place]] + (split ? `, split: ${split}\\n${says}` : "");
};
get("rows").onclick = event => {
  const file = event.target.dataset.name && note(event.target)[3][2];
  if (file) window.open(file);
};
for (const id of ["version", "only", "mode", "differ"]) get(id).onchange = draw;
get("filter").oninput = draw;
draw();
</script>
</html>
"""
