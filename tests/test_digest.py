"""One value, one string, one hash: whatever library holds it and however it lies in memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline import digest


def test_canonical_json_has_one_form():
    value = {"b": [1, 2.5, True, None], "a": "ü", "t": (1,)}
    assert digest.canonical_json(value) == '{"a":"ü","b":[1,2.5,true,null],"t":[1]}'
    assert digest.canonical_json({"t": [1], "a": "ü", "b": [1, 2.5, True, None]}) == digest.canonical_json(value)


@pytest.mark.parametrize("value", [0.1, 1e-323, -0.0, 1.7976931348623157e308, 5e-07, float(np.float32(0.1))])
def test_floats_come_back_bit_by_bit(value):
    back = json.loads(digest.canonical_json(value))
    assert back.hex() == value.hex() == digest.float_hex(value)


def test_values_that_json_cannot_write_are_strings():
    text = digest.canonical_json([math.nan, math.inf, -math.inf, np.float32(0.5), np.int64(3)])
    assert text == '["NaN","Infinity","-Infinity",0.5,3]'
    assert [digest.float_hex(v) for v in json.loads(text)[:3]] == ["nan", "inf", "-inf"]


@pytest.mark.parametrize("value", [{1: "a"}, {"a": {None: 1}}, object(), {"a": {1, 2}}, b"x"])
def test_what_has_no_form_is_refused(value):
    with pytest.raises(TypeError):
        digest.canonical_json(value)


def test_write_json_is_atomic_and_replaces_the_file_instead_of_writing_into_it(tmp_path):
    path = tmp_path / "new" / "a.json"
    digest.write_json(path, {"b": 1, "a": 0.5})
    assert path.read_bytes() == b'{"a":0.5,"b":1}\n'
    linked = tmp_path / "cache"
    linked.hardlink_to(path)
    digest.write_json(path, {"a": 1})
    assert linked.read_bytes() == b'{"a":0.5,"b":1}\n'
    with pytest.raises(TypeError):
        digest.write_json(path, object())
    assert digest.read_json(path) == {"a": 1}
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1', ""])
def test_read_json_refuses_what_is_ambiguous_or_cut(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError):
        digest.read_json(tmp_path / "a.json")


def test_tensor_hash_is_a_published_format():
    expected = digest.sha256_bytes(b"float32[2,1]\n" + bytes.fromhex("0000803f") + bytes.fromhex("00000080"))
    assert digest.sha256_tensor(np.array([[1.0], [-0.0]], dtype=np.float32)) == expected


def test_tensor_hash_sees_dtype_shape_and_every_bit():
    a = np.zeros((2, 3), dtype=np.float32)
    ulp, minus = a.copy(), a.copy()
    ulp[1, 2], minus[0, 0] = np.float32(1e-45), np.float32(-0.0)
    others = [a.reshape(3, 2), a.astype(np.int32), a.astype(np.float64), a[:1], ulp, minus]
    assert len({digest.sha256_tensor(x) for x in [a, *others]}) == 1 + len(others)


def test_tensor_hash_ignores_strides_byte_order_and_library():
    import torch

    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert digest.sha256_tensor(np.asfortranarray(a)) == digest.sha256_tensor(a) == digest.sha256_tensor(a.astype(">f4"))
    t = torch.from_numpy(a.copy())
    assert digest.sha256_tensor(torch.nn.Parameter(t)) == digest.sha256_tensor(t.t().contiguous().t()) == digest.sha256_tensor(a)


def test_files_and_tensors_hash_alike(tmp_path):
    import torch
    from safetensors.torch import save_file as save_torch

    tensors = {
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(1.5),
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
    }
    save_torch(tensors, tmp_path / "a.safetensors")
    hashes = digest.hash_safetensors(tmp_path / "a.safetensors")
    assert hashes == {name: digest.sha256_tensor(t) for name, t in tensors.items()}
    assert digest.tensors_digest(hashes) == digest.tensors_digest(dict(sorted(hashes.items())))
    assert [t.name for t in digest.iter_safetensors(tmp_path / "a.safetensors", "ids")] == ["ids"]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b[:5], lambda b: b"\xff" * 8 + b[8:], lambda b: b""])
def test_a_damaged_file_is_no_evidence(tmp_path, damage):
    path = tmp_path / "a.safetensors"
    save_file({"a": np.arange(3.0)}, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError):
        digest.hash_safetensors(path)


def test_file_hash(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert digest.sha256_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_reports_need_no_torch():
    code = "import sys, stages.validate, stages.compare, stages.track; assert not {'torch', 'mlflow', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
