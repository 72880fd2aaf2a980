"""Defects in what is encrypted at rest, and in its keys."""

from __future__ import annotations

from tools.defects.mutant import Edit, Mutant, one

KEYS, RECORDS, SHARDS = "store/files/keys.py", "store/files/sealed_records.py", "store/files/shards.py"
TABLE, SCHEMA, VEIL = "store/files/table.py", "store/rows/schema.py", "store/files/veil.py"
STORE, REKEY = "tests/store/test_encrypted.py", "tests/store/test_rekey.py"
SAYS, FLIPS = f"{STORE}::test_nothing_that_says_something_is_in_any_file", f"{STORE}::test_every_flipped_bit"

ENCRYPTION: tuple[Mutant, ...] = (
    one(
        "encryption: records are written as they are",
        SHARDS,
        "        self.write(part, slot, self._sealing[part])\n",
        "        self.write(part, slot, record)\n",
        SAYS,
    ),
    one(
        "encryption: sealed columns are written as they are",
        TABLE,
        "values[at] = self._veil.seal(_as_bytes(values[at]), self._bound(at))",
        "pass",
        SAYS,
        "tests/sessions/test_session_records.py::test_an_encrypted_file_says_nothing_without_its_key",
    ),
    one(
        "encryption: columns that rows are found by are written as they are",
        TABLE,
        "return value if self._veil is None or value is None else self._veil.match(_as_bytes(value))",
        "return value",
        SAYS,
    ),
    one(
        "encryption: a stored response that its model's server does not find",
        "rekindle_models/stored.py",
        "(found.match(namespace), found.match(id))",
        "(namespace, id)",
        SAYS,
    ),
    one(
        "encryption: token ids are written as they are",
        SCHEMA,
        "return ids if self._veil is None else self._veil.trace(parent, ids)",
        "return ids",
        SAYS,
    ),
    one(
        "encryption: namespaces are in the description",
        "store/files/description.py",
        'fields |= {"namespaces": [], ',
        "fields |= {",
        SAYS,
    ),
    one(
        "encryption: the secret is next to its ciphertext",
        KEYS,
        "return _wrapping(master).seal(keys.secret + keys.data, _MAGIC)",
        "return bytes(OVERHEAD) + keys.secret + keys.data",
        SAYS,
    ),
    one(
        "encryption: a checksum of what is encrypted",
        SHARDS,
        "return Place(part, slot, 0, seal)",
        "return Place(part, slot, crc, seal)",
        f"{STORE}::test_no_checksum_says_what_is_encrypted",
    ),
    one(
        "encryption: a record whose tag is not looked at",
        RECORDS,
        "            self._cipher.finalize_with_tag(self._tag)\n",
        "            pass\n",
        f"{FLIPS}_of_a_record_is_refused",
        f"{STORE}::test_a_changed_record_shortens_the_prefix_and_is_saved_again",
    ),
    one(
        "encryption: neighbouring records whose tags are not looked at",
        "store/files/sealed_reader.py",
        "            if not pieces.is_whole():\n                return number\n",
        "",
        f"{STORE}::test_the_reader_says_how_many_leading_records_are_whole",
    ),
    one(
        "encryption: records that can be moved to another slot",
        RECORDS,
        "return block_hash + _PLACE.pack(part, slot)",
        "return block_hash + _PLACE.pack(part, 0)",
        f"{FLIPS}_of_a_record_is_refused",
    ),
    one(
        "encryption: records of one block in the place of another's",
        RECORDS,
        "return block_hash + _PLACE.pack(part, slot)",
        "return _PLACE.pack(part, slot)",
        f"{FLIPS}_of_a_record_is_refused",
    ),
    one(
        "encryption: one key for all records",
        RECORDS,
        "key = secrets.token_bytes(KEY_BYTES)",
        "key = bytes(KEY_BYTES)",
        f"{STORE}::test_records_that_were_swapped_or_put_back_are_refused",
    ),
    Mutant(
        "encryption: a purge that leaves the log of the index",
        (
            Edit("store/maintenance/purging.py", "    parts.index.truncate_wal()\n", ""),
            Edit("store/maintenance/purging.py", "or _in_files(parts, forgotten)", "or None"),
            Edit("store/rows/index.py", "        drop_traces(self.writer, last)\n", ""),
        ),
        (f"{STORE}::test_a_purge_takes_the_keys_of_its_records",),
    ),
    one(
        "encryption: a clear store taken with a key",
        KEYS,
        "            raise StoreError(_NOT_ENCRYPTED.format(directory))\n",
        "            pass\n",
        f"{STORE}::test_another_key_or_none_is_refused_and_changes_nothing",
    ),
    one(
        "encryption: a new key in the place of the old one at once",
        KEYS,
        "return [*entries, _entry(keys, new)]",
        "return [_entry(keys, new)]",
        f"{REKEY}::test_a_change_that_is_killed_anywhere_leaves_all_readable_and_can_be_ended",
    ),
    one(
        "encryption: a key change that is not written aside",
        KEYS,
        '        fd = fs.open_file(aside, "create")\n        try:\n            _fill(fd, _packed(entries), fs)\n'
        "            fs.rename(aside, path)\n",
        '        fd = fs.open_file(path, "create")\n        try:\n            _fill(fd, _packed(entries), fs)\n',
        f"{REKEY}::test_a_change_that_is_killed_anywhere_leaves_all_readable_and_can_be_ended",
    ),
    one(
        "encryption: an old key that still opens the store",
        KEYS,
        "return [entry for entry in entries if _held(entry, current) is not None][:1]",
        "return entries",
        f"{REKEY}::test_a_change_that_is_killed_anywhere_leaves_all_readable_and_can_be_ended",
    ),
    one(
        "encryption: what a file of keys held before is left",
        KEYS,
        "        fs.write(before, 0, bytes(len(content)))\n",
        "",
        f"{REKEY}::test_the_old_content_is_overwritten",
    ),
    one(
        "encryption: the key of slots is not changed",
        KEYS,
        "return [path for path in found if (path / SECRET_FILE).exists()]",
        "return []",
        f"{REKEY}::test_a_change_that_is_killed_anywhere_leaves_all_readable_and_can_be_ended",
    ),
    one(
        "encryption: codes of ids that do not depend on what is before",
        VEIL,
        "            codes += digest.copy().digest()\n",
        "            codes += hashlib.blake2b(ids[at : at + ID_BYTES], digest_size=CODE_BYTES).digest()\n",
        f"{STORE}::test_traces_say_how_much_siblings_share_and_nothing_else",
    ),
    one(
        "encryption: equal ids under other blocks look equal",
        VEIL,
        "digest = hashlib.blake2b(owner, digest_size",
        'digest = hashlib.blake2b(b"", digest_size',
        f"{STORE}::test_traces_say_how_much_siblings_share_and_nothing_else",
    ),
    one(
        "encryption: blocks are not salvaged with their keys",
        "store/rows/rebuild.py",
        "                            found.blocks[part, slot] = tables.ids.block(rows)\n",
        "                            pass\n",
        f"{STORE}::test_an_index_set_aside_gives_back_its_records",
    ),
)
