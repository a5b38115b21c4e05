"""What is no report is refused with one line and exit status 2; the schemas mean here what they mean to jsonschema."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import pytest
from verified_runs import make_project, report_of

from pipeline.verify import document, form, schema
from pipeline.verify.command import main


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return report_of(make_project(tmp_path_factory.mktemp("documents"), iterations=1))


def refused(data: bytes, tmp_path: Path, capsys) -> str:
    """The one line that the command prints."""
    path = tmp_path / "report.json"
    path.write_bytes(data)
    assert main([str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("error: ")
    return captured.err


TEXTS = {
    "no JSON": (b"{", "Expecting property name"),
    "empty": (b"", "Expecting value"),
    "no object": (b"[]", "holds a list"),
    "no runs": (b"{}", "has no all_parameter"),
    "no UTF-8": (b'{"a": "\xff"}', "no UTF-8 text"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "no UTF-8 text"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "BOM"),
    "NaN": (b'{"a": NaN}', "NaN is no JSON"),
    "infinity": (b'{"a": -Infinity}', "-Infinity is no JSON"),
    "a float beyond a double": (b'{"a": 1e999}', "beyond a double"),
    "a huge integer": (b'{"a": ' + b"9" * 5000 + b"}", "beyond 64 bits"),
    "2 to the 63": (b'{"a": 9223372036854775808}', "beyond 64 bits"),
    "a key twice": (b'{"verdict": "identical", "a": {"b": 1, "b": 2}}', '"b" comes twice'),
    "deep lists": (b"[" * 100_000 + b"]" * 100_000, "nested deeper than 64"),
    "65 deep": (b"[" * 65 + b"]" * 65, "nested deeper than 64"),
    "half a character": (b'{"\\ud800": 1}', "half a character"),
    "another schema": (b'{"schema_version": "lockstep.comparison.v2"}', "has no"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_document_is_one_line(name, tmp_path, capsys):
    data, message = TEXTS[name]
    assert message in refused(data, tmp_path, capsys)


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "none.json")]) == 2
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_terminals_are_not_obeyed(report, tmp_path, capsys):
    text = json.dumps(report).replace("tiny-tp2", "tiny-tp2\\u001b[2J\\nconsistent: ")
    path = tmp_path / "report.json"
    path.write_text(text)
    assert main([str(path)]) == 3
    out = capsys.readouterr().out
    assert "\x1b" not in out and not any(line.startswith("consistent") for line in out.split("\n"))


FORMS = {
    "a field of the report": (lambda r: r.update(extra=1), "report.extra: is not a known field"),
    "a field of a run": (lambda r: r["runs"][0].update(extra=1), "report.runs.0.extra"),
    "a field of a validation": (lambda r: r["runs"][1]["validation"].update(extra=1), "report.runs.1.validation.extra"),
    "a field of a link": (lambda r: r["runs"][0]["chain"][1].update(extra=1), "chain.1.extra"),
    "a float for a count": (lambda r: r["totals"].update(layouts=2.0), "totals.layouts: is no integer"),
    "a boolean for a count": (lambda r: r["totals"].update(iterations=True), "totals.iterations: is no integer"),
    "a number for a flag": (lambda r: r.update(tokens_equal=1), "tokens_equal: is no boolean"),
    "a sha256 with a line feed": (lambda r: r.update(experiment_digest="a" * 64 + "\n"), "experiment_digest: does not match"),
    "a text for a number": (lambda r: r["runs"][0]["performance"]["0"].update({"perf/train_time": "1"}), "perf/train_time"),
    "another version": (lambda r: r.update(schema_version="lockstep.comparison.v2"), "schema_version"),
    "two faults": (lambda r: r.update(extra=1, other=2), "(and 1 more)"),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_has_another_form_is_one_line(name, report, tmp_path, capsys):
    change, message = FORMS[name]
    changed = copy.deepcopy(report)
    change(changed)
    assert message in refused(json.dumps(changed).encode(), tmp_path, capsys)


def test_large_numbers_cost_no_time(report, tmp_path, capsys):
    """Ranks, samples and tokens that nobody has: refused before anyone counts to them."""
    huge = copy.deepcopy(report)
    huge["runs"][0]["execution"]["layout"]["dp"] = 10**12
    assert "has more than 65536 ranks" in refused(json.dumps(huge).encode(), tmp_path, capsys)
    huge = copy.deepcopy(report)
    for run in huge["runs"]:
        run["tokens"]["0"]["sample_count"] = 2**62
        run["steps"]["0"]["train/global_batch_size"] = 2.0**62
    (tmp_path / "report.json").write_text(json.dumps(huge))
    assert main([str(tmp_path / "report.json")]) == 3


@pytest.mark.parametrize("name", ["comparison", "validation", "fields", "published"])
def test_every_schema_is_one_and_of_known_keywords(name):
    jsonschema.Draft202012Validator.check_schema(schema.load(name))


@pytest.mark.parametrize("keyword", [{"maxLength": 3}, {"items": {"not": {}}}, {"$defs": {"a": {"format": "date"}}}, {"type": "decimal"}])
def test_an_unknown_keyword_is_an_error(keyword):
    with pytest.raises(ValueError, match="unknown"):
        schema.refuse_unknown({"properties": {"a": keyword}}, "test")


KEYWORDS = (
    {"type": ["integer", "null"]}, {"const": 1}, {"enum": ["a", None]}, {"minimum": 2}, {"minLength": 2}, {"pattern": "^a+$"},
    {"minItems": 1}, {"maxItems": 1}, {"items": {"type": "string"}}, {"required": ["a"]}, {"minProperties": 1},
    {"properties": {"a": {"const": 1}}},
    {"patternProperties": {"^a": {"type": "string"}}, "additionalProperties": False},
    {"properties": {"b": True}, "additionalProperties": {"type": "null"}},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]}, {"allOf": [{"type": "integer"}, {"minimum": 2}]},
    {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"minimum": 2}}, {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}},
)  # fmt: skip
VALUES = (None, True, 1, 2, 3, "", "a", "aa", "b", [], ["a"], [1, 2], {}, {"a": 1}, {"a": "x"}, {"b": None}, {"ab": 2, "b": 1})


@pytest.mark.parametrize("keywords", KEYWORDS)
def test_keywords_mean_what_they_mean_to_jsonschema(keywords):
    own = [not list(schema.errors(value, keywords, keywords)) for value in VALUES]
    assert own == [jsonschema.Draft202012Validator(keywords).is_valid(value) for value in VALUES]
    assert True in own and False in own


def test_same_is_equality_of_type_and_sign():
    values = [0, 0.0, -0.0, False, None, "", "0", [], {}, [0], [0.0], {"a": 0}, {"a": False}, 1, 1.0, True]
    assert [[document.same(a, b) for b in values] for a in values] == [[i == j for j in range(len(values))] for i in range(len(values))]
    assert document.same({"a": 1, "b": [2]}, {"b": [2], "a": 1})


def test_a_good_report_has_its_form(report):
    form.check(report)
