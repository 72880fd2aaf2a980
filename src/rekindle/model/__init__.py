"""One forward step and one sample of any causal language model of `transformers`.

Owns the transformers model: nothing outside this folder calls it. Knows blocks only as indices passed with each step;
knows nothing of requests over time, queues or HTTP.
"""

import logging

# Libraries of quantised layers, which transformers imports where they are installed, warn of parts for other devices,
# of deprecations, and at every product in 8 bits of a cast of its inputs.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops", "bitsandbytes.autograd._functions"):
    logging.getLogger(_name).setLevel(logging.ERROR)
