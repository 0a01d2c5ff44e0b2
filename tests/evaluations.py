"""Logs of evaluations by hand, and what tests read from pages."""

from xml.etree import ElementTree

from lamina.eval.log import Log

SETTINGS = {"model": "models/tiny <&> model", "n": 20, "seeds": 2, "protocol": "frozen", "chat": False}
ENVIRONMENT = {
    "kind": "environment", "command": "lamina evaluate -o results", "lamina": "0.1.0", "commit": None,
    "device": "H200", "layers": 6, "packed": [1, 3, 5],
}  # fmt: skip
KINDS = ("codes", "scales", "windows")


def answer(arm, i, right, bits, task="t", n_bytes=None, **more):
    record = {"kind": "answer", "task": task, "arm": arm, "seed": i // 10, "item": str(i), "right": right}
    record |= {"bits_history": bits, "bits_at_context": None if bits is None else bits + 1}
    if n_bytes is not None:
        record |= {"kv_bytes": sum(n_bytes), "kv_bytes_by_kind": dict(zip(KINDS, n_bytes)), "kv_bytes_bf16": 4000}
    return record | more


def records():
    """The exact arm has 15 of 20 right, one arm loses 10 and gains none, one loses 1 and gains 2, one is unfinished."""
    found = [ENVIRONMENT]
    found += [answer("bf16", i, i < 15, 16.0, n_bytes=(0, 0, 4000)) for i in range(20)]
    found += [answer("kivi-int2", i, i < 5, 2.0 + i % 2, n_bytes=(500, 0, 400), simulated=True) for i in range(20)]
    found += [
        {"kind": "warm-up", "task": "t", "arm": "lamina-live", "seed": seed, "tiers": tiers, "items": []}
        for seed, tiers in enumerate(([[2, 4], [2, 2], [8, 2]], [[2, 2], [4, 2], [8, 4]]))
    ]
    tiers = [[2, 2], [4, 2], [8, 4]]
    right = [i < 14 or i in (17, 18) for i in range(20)]
    found += [
        answer("lamina-live", i, right[i], 3.0, n_bytes=(600 + i, 100, 300), tiers=tiers) for i in range(20)
    ]  # fmt: skip
    found += [answer("lamina-int2", i, True, None) for i in range(7)]
    return found


def write(folder, given=None, settings=SETTINGS):
    log = Log(folder / "answers.jsonl", settings)
    for record in records() if given is None else given:
        log.append(record)
    return folder


def parse(html):
    assert html.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(html.removeprefix("<!DOCTYPE html>\n"))


def words(element):
    return " ".join("".join(element.itertext()).split())


def table(page, name):
    (found,) = page.iterfind(f".//table[@id='{name}']")
    return [[words(cell) for cell in row] for row in found.iter("tr")]


def pictures(page):
    return {svg.get("aria-labelledby").split("-title")[0]: svg for svg in page.iter("svg")}
