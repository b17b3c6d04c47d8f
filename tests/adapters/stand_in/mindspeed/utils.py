"""Stand-in: where MindSpeed keeps what attention and rotary embedding read."""

HEARD = {}


def set_actual_seq_len(actual_seq_len):
    HEARD["actual_seq_len"] = actual_seq_len


def set_position_ids(position_ids):
    HEARD["position_ids"] = position_ids
