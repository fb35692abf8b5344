"""Messages of torch that name no cause get a note that does; others stay as they are."""

import pytest

from fsdplaunch.runtime.torch_error_notes import explaining_mixtures


@pytest.mark.parametrize(
    ("kind", "message", "remedy"),
    [
        (
            TypeError,
            "Invariant encountered: value was None when it should not be",
            "fsdp_transformer_layer_cls_to_wrap",
        ),
        (RuntimeError, "expected scalar type BFloat16 but found Float", "x.to(weight.dtype)"),
        (RuntimeError, "mat1 and mat2 must have the same dtype, but got Float and BFloat16", "inputs in objects"),
        (RuntimeError, "Found dtype Float but expected BFloat16", "precision.output: fp32"),
        (RuntimeError, "aten.add.Tensor got mixed torch.Tensor and DTensor", "fsdplaunch.prepare"),
    ],
)
def test_known_message_gets_its_remedy(kind: type[Exception], message: str, remedy: str) -> None:
    with pytest.raises(kind) as raised, explaining_mixtures():
        raise kind(message)
    assert any(remedy in note for note in raised.value.__notes__)


def test_other_message_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError) as raised, explaining_mixtures():
        raise RuntimeError("expected scalar type Half")
    assert not hasattr(raised.value, "__notes__")
