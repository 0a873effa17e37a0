"""A server of Google's that says nothing is an error."""

import json
import sys

import pytest
from support import inside

import eqx_ckpt as ec


inside.limit(pytest.MonkeyPatch(), **json.loads(sys.argv[1]))
try:
    ec.open("gs://bucket/x")
except ConnectionError as e:
    assert "gs://bucket/x" in str(e) and "says nothing" in str(e), e
else:
    assert False
