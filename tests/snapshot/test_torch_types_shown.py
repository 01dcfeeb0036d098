"""A snapshot shows torch's dtypes, devices, and sizes, also within lists and in HTML."""

import torch

import limpet


def test_torch_types_are_values_of_views_and_of_the_tree(tmp_path):
    values = {"dtype": torch.bfloat16, "many": [torch.device("cuda:1"), torch.Size([2, 3])]}
    snapshot = limpet.save(tmp_path / "version_1", {"config": values, "x": torch.zeros(2)})
    assert snapshot["config"]["dtype"] is torch.bfloat16
    assert snapshot["config/many"] == values["many"]
    assert snapshot.tree["config"] == values
    html = snapshot._repr_html_()
    assert "torch.bfloat16" in html
    assert "torch.Size([2, 3])" in html
