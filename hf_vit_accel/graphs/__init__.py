"""CUDA graphs of the whole encoder, for inference (`runner`) and for training steps (`training`).

**What a graph captures.** In inference: one `encode` over one layout, padded or in its exact shape, from
static pixels to static outputs.
In training: one graph of the forward of `encode` over one layout, and up to eight of its backward.
A graph reads weights and buffers where they lie in memory. Pixels are copied in before a replay, in inference also the
arrays of the layout. A training graph keeps the arrays of its own layout.

**How a call finds its graph.** By its `store.Identity`, and by a signature.
In inference the signature holds rows, array shapes and dtypes, and the host decisions of all plans.
In training it is the call's grid, and which outputs receive gradients.

**How a pass is decided.** Once, in `GraphStore.decide`, when its signatures are known: for every way to replay it that
`policy.Policy` allows by the calls so far, its graphs are looked up. If none is missing, it is replayed. Else one
question decides whether they may be captured now. A capture that fails is noted, and the pass is decided anew.

**What drops graphs** stands in docs/how-it-works.md.

The other files: `store` holds what both runners share. `budgets` packs images into budgets, pads layouts, and says
whether a replay pays. `step` captures a training step. `memory` gives all up when memory runs out. `recorder` makes
all calls of CUDA.
"""
