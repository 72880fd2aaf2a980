"""Defects in multi-head latent attention."""

from __future__ import annotations

from tools.defects.kernels import native
from tools.defects.mutant import one

LATENT = "tests/model/test_latent.py"
LOGITS = f"{LATENT}::test_logits_are_the_model_s_own"
OTHER_FORMS = f"{LATENT}::test_maps_of_another_form_are_refused"
REFERENCE = "tests/kv/test_paged_attention.py::test_vectorised_agrees_with_the_definitions"
RIGHT = "tests/kv/test_fused.py::test_kernels_agree_with_the_definitions"

LATENTS = (
    one(
        "the rotary part of queries not scaled",
        "kv/attention.py",
        "torch.cat((rotated, native.to(wide) * scaling), dim=-1)",
        "torch.cat((rotated, native.to(wide)), dim=-1)",
        REFERENCE,
    ),
    one(
        "sums of latents not rotated back",
        "kv/attention.py",
        "if layer.spec.out_format in CODED:",
        "if layer.spec.v_format in CODED:",
        REFERENCE,
    ),
    one(
        "rotary keys before latents",
        "kv/decode.py",
        "torch.cat((k, v), dim=-1, out=keys), k",
        "torch.cat((v, k), dim=-1, out=keys), k",
        REFERENCE,
    ),
    one(
        "queries absorbed by the map of another head",
        "model/latent.py",
        "q[..., :size] @ self.keys.transpose(1, 2), q[..., size:]",
        "q[..., :size] @ self.keys.flip(0).transpose(1, 2), q[..., size:]",
        LOGITS,
    ),
    one(
        "V of another head",
        "model/latent.py",
        "(summed.transpose(0, 1) @ self.values.transpose(1, 2))",
        "(summed.transpose(0, 1) @ self.values.flip(0).transpose(1, 2))",
        LOGITS,
    ),
    one("latent maps not compared", "model/latent.py", "not (appended and same", "not (True or same", OTHER_FORMS),
    one(
        "only rotary keys compared",
        "model/latent.py",
        "appended and same_largest(k, expected_k, TOLERANCE) and same_largest(v, expected_v, TOLERANCE)",
        "appended",
        OTHER_FORMS,
    ),
    one(
        "blocks of latents not told from those of K and V",
        "spec.py",
        'if name != "latent" or value}',
        'if name != "latent"}',
        f"{LATENT}::test_digests_tell_latents_apart_and_leave_others_as_they_were",
    ),
    native(
        "rotary keys of the kernels in the place of latents",
        "levels.hpp",
        "(int)layer.v_dim, dim / 2, first, count, m);",
        "(int)layer.v_dim, 0, first, count, m);",
        RIGHT,
    ),
    native(
        "the scales of a token for the next one",
        "levels.hpp",
        "next = steps_of_words(bytes + (t + 1) * groups, word",
        "next = steps_of_words(bytes + t * groups, word",
        RIGHT,
    ),
    native(
        "a scale for each word of a latent",
        "levels.hpp",
        "bytes[(word + i) * q4h::WORD_CODES / q4h::K_GROUP]",
        "bytes[word * q4h::WORD_CODES / q4h::K_GROUP + i]",
        RIGHT,
    ),
    native(
        "levels of latents for numbers",
        "levels.hpp",
        "    scale_k(dim, first, count, m);\n",
        "",
        RIGHT,
    ),
    native(
        "rotary queries rotated with the others",
        "attention.hpp",
        "q4h::rotate(x, (int)job.layer.k_dim, job.layer.signs);",
        "q4h::rotate(x, dim, job.layer.signs);",
        RIGHT,
    ),
    native(
        "sums of latents not rotated back by the kernels",
        "attention.hpp",
        "if (q4h::output_format(layer) != RK_BF16) q4h::unrotate(",
        "if (layer.v_format != RK_BF16) q4h::unrotate(",
        RIGHT,
    ),
)
