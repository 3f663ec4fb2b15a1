"""Stands in for the export tests that transformers' source archive leaves out: its exporter, run on every class."""

from __future__ import annotations

import copy

import torch
from transformers.testing_utils import torch_device


class ExportTesterMixin:
    """Named as transformers' class, because its tests look for that name among the bases."""

    def _check_export(self, dynamic: bool):
        if not self.test_torch_exportable:
            self.skipTest("test_torch_exportable is False")
        from transformers.exporters import DynamoConfig, DynamoExporter

        case = self.conformance_case
        if not self.all_model_classes:
            self.skipTest("its encoder-decoder, which has both of its towers, is exported")
        for model_class in self.all_model_classes:
            with self.subTest(model_class.__name__):
                config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
                config = case.config(num_hidden_layers=1) if case.one_layer else config
                config.use_cache = False
                torch.manual_seed(0)
                model = model_class(copy.deepcopy(config)).to(torch_device).eval()
                inputs = self._prepare_for_class(inputs, model_class)
                with torch.no_grad():
                    expected = model(**copy.deepcopy(inputs))
                exported = DynamoExporter().export(model, copy.deepcopy(inputs), DynamoConfig(dynamic=dynamic))
                actual = exported(**copy.deepcopy(inputs))
                compared = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
                self.assertTrue(compared, "the model gives no tensor to compare")
                for name in compared:
                    value = actual[name] if hasattr(actual, "keys") else getattr(actual, name)
                    torch.testing.assert_close(value.float(), expected[name].float(), atol=1e-3, rtol=1e-3)

    def test_ours_export_dynamo_static(self):
        if self.conformance_case.sampled:
            self.skipTest("sizes that are free include those that are not; the whole run exports both")
        self._check_export(dynamic=False)

    def test_ours_export_dynamo_dynamic(self):
        self._check_export(dynamic=True)
