"""Limits of all rooms that tests change, so that a little is much."""


class Limits:
    # Data files are written side by side; more of them than this help nobody.
    max_files: int = 32
    min_file_bytes: int = 64 * 2**20
    # With more chunks than these the database would take about 1 GiB of process 0.
    database_chunks: int = 2**20
    # So a node of the database has some 100 KiB of ordinary names: one read for a leaf.
    node_entries: int = 2048
    # More files take longer to sync one by one than all that others may have written to
    # the same file system.
    singly_synced_files: int = 256
    # Pages of digests that follow each other are read together up to this size.
    joint_digest_bytes: int = 2**20
    # Copies of arrays that queued saves keep, but for those of the last one.
    queued_copy_bytes: int = 2 * 2**30
    # Parts of one static value; numbers and texts count for little.
    value_parts: int = 2**14
    # The cost of the record of a tree without leaves: see `_record_json.check`.
    tree_cost: int = 2**26
    # Steps outside of a journal before it is written anew: so many, or one for so many
    # that are in it.
    unlisted_steps: int = 64
    unlisted_step_share: int = 16
    # Two indices of a step that are written further apart have different stamps, even
    # where the clock of the file system is coarse.
    stamp_seconds: float = 3
    # Keys that a store lists for one request.
    listed_keys: int = 1000
    # A load from a path that is replaced meanwhile begins again for so long.
    reopen_seconds: float = 30
    # A wait for a lock: until the log names its holder, and at most.
    lock_log_seconds: float = 10
    lock_seconds: float = 1800
    # A request to a server: until we look whether the server is there at all, until it
    # has to answer that, and until the log says that there is no answer. A server that
    # has answered before may be away for so long.
    server_look_seconds: float = 2
    server_answer_seconds: float = 10
    server_log_seconds: float = 5
    server_away_seconds: float = 30
    # TensorStore takes some redirects for errors that pass, and tries them for long.
    # After so long, the server is asked as well where it leads.
    redirect_seconds: float = 1
    # A file system of the network shows a directory of another host within this time.
    directory_seconds: float = 30
    # Assumed for `reshard="auto"`: what a process reads and verifies in a second.
    read_bytes_per_second: float = 0.5e9


limits = Limits()
