"""100 rows see 160 keys as two parts, as they come to a rank of a ring; prints which kernels were used."""

import json

import torch

from fsdplaunch.runtime.split.ring import added
from fsdplaunch.runtime.torch_internals import tensors

KERNELS = {"float32": "EFFICIENT", "float16": "FLASH", "bfloat16": "FLASH"}
SCALE = 0.125


def apart(dtype: str) -> tuple[str, float]:
    """Return the kernel, and how far attention over parts of the keys is from that over all of them, in fp64."""
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    full = [torch.randn(2, 3, length, 64, device="cuda", dtype=kind) for length in (100, 160, 160)]
    query, key, value = (each.requires_grad_() for each in full)
    wanted = torch.nn.functional.scaled_dot_product_attention(*(each.double() for each in full), scale=SCALE)
    gradient = torch.randn_like(query)
    wanted.backward(gradient.double())
    kernel = tensors.kernel_for(query, key, value)
    name = next(each for each in ("FLASH", "EFFICIENT") if kernel is getattr(tensors, each))
    with torch.no_grad():
        parts = [(key[:, :, :100], value[:, :, :100]), (key[:, :, 100:], value[:, :, 100:])]
        found = [kernel.forward(query, *part, False, SCALE) for part in parts]
        result, sums = added(*[(each.float(), its_sums) for each, its_sums, _ in found])
        result = result.to(kind)
        grads = [
            kernel.backward(gradient, query, *part, result, sums, more, False, SCALE)
            for part, (_, _, more) in zip(parts, found, strict=True)
        ]
    to_query = grads[0][0].float() + grads[1][0].float()
    to_key, to_value = (torch.cat([one[place] for one in grads], 2) for place in (1, 2))
    pairs = [(result, wanted), (to_query, query.grad), (to_key, key.grad), (to_value, value.grad)]
    return name, max(float((one.float() - other.float()).abs().max()) for one, other in pairs)


def main() -> None:
    """Print what was found."""
    words = []
    for dtype in KERNELS:
        name, by = apart(dtype)
        if by > (1e-2 if dtype == "float32" else 5e-2):
            raise SystemExit(f"{dtype}: {name} is {by:.0e} from attention over all keys")
        words.append(f"{dtype} {name} {by:.0e}")
    print(json.dumps({"found": ", ".join(words)}))


if __name__ == "__main__":
    main()
