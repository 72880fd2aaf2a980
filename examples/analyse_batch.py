"""Show what a batch of prompts shares before it is sent. Needs only numpy.

python examples/analyse_batch.py
"""

from rekindle.cache import analyze_batch

SYSTEM = "You sort letters of the harbour office. Answer with one word. "
RULES = {"complaint": SYSTEM + "Is this a complaint? ", "language": SYSTEM + "Which language is this? "}
LETTERS = ["The crane is broken again.", "Merci pour tout.", "When does the ferry leave?", "The crane is broken again."]

prompts = [rule + letter for rule in RULES.values() for letter in LETTERS]
found = analyze_batch(prompts, keys="text")  # or keys="ids", with your tokenizer's ids

print(f"{found.num_prompts} prompts, {found.total_tokens} characters, {found.distinct_tokens} of them distinct")
print(f"{found.deduplication:.0%} need not be computed if shared prefixes are cached")
for shared in found.shared[:3]:
    end = prompts[shared.first_prompt][: shared.length][-24:]
    print(f"  {shared.num_prompts} prompts share {shared.length} characters, {shared.saved_tokens} saved: ...{end!r}")
for same in found.identical:
    print(f"  prompts {same} are the same: send one of them")
