"""The files of a store, and what is in them.

    STORE/store.json            the only mutable file: names the generation that is current, its counts and digest
    STORE/data-1f0c…/           one generation, never changed once store.json names it
        audio.i16               16-bit little-endian samples at 16 kHz, user after user, utterance after utterance
        audio_offsets.npy       [utterances + 1] first sample of each utterance
        user_utterances.npy     [users + 1] first utterance row of each user
        user_keys.npy           [users] 64-bit key of the user's name
        user_order.npy          [users] rows sorted by key, to find a user by name
        users_in_time.npy       [users] whether the user's utterances lie in the order they were spoken in; only
                                there if somebody's do
        utterances.jsonl, utterance_offsets.npy    id, text, metadata of each utterance
        users.jsonl, user_offsets.npy              name, metadata of each user

A store that points into the corpus's own FLAC files instead of copying them (version 2) has in place of audio.i16:

        audio                   a link to the folder of the corpus, which may be moved: `ln -sfn NEW STORE/data-…/audio`
        files.jsonl, file_offsets.npy              path below it, length in bytes and samples, digest of its ends
        utterance_files.npy     [utterances] row in files.jsonl
        utterance_starts.npy    [utterances] first sample in that file

`audio_offsets` then says how long each utterance is, as in every store. While `prepare` is at work there may be

        unfinished.json, *.part                    how far it has come, for the `prepare` that goes on after a kill

Users are sorted by (split, name), so a split is a range of rows. Everything is memory-mapped: opening costs the
same for ten users and for ten million.
"""

FORMAT = "sottovoce store"
VERSION = 1
POINTING_VERSION = 2  # releases that know version 1 alone must not take such a store for an empty one
HEADER = "store.json"
LOCK = ".lock"
GENERATION_PREFIX = "data-"
UNFINISHED = "unfinished.json"

AUDIO = "audio.i16"
AUDIO_OFFSETS = "audio_offsets.npy"
USER_UTTERANCES = "user_utterances.npy"
USER_KEYS = "user_keys.npy"
USER_ORDER = "user_order.npy"
USERS_IN_TIME = "users_in_time.npy"
UTTERANCES = "utterances.jsonl"
UTTERANCE_OFFSETS = "utterance_offsets.npy"
USERS = "users.jsonl"
USER_OFFSETS = "user_offsets.npy"

AUDIO_LINK = "audio"
FILES = "files.jsonl"
FILE_OFFSETS = "file_offsets.npy"
UTTERANCE_FILES = "utterance_files.npy"
UTTERANCE_STARTS = "utterance_starts.npy"
