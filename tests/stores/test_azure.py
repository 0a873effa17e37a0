"""What is of Azure alone. What all stores promise is asked in `storage`, `run` and
`save`, where it is one of them. The server is Azurite."""

import base64
import itertools
import pickle
import traceback

import numpy as np
import pytest
from support import servers

import eqx_ckpt as ec


_numbers = itertools.count()
_OTHER = base64.b64encode(b"an0ther s3cr3t key").decode()
_SET = ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ENDPOINT")


@pytest.fixture
def url(az):
    with az.used():
        yield f"{servers.BUCKETS['az']}/own/{next(_numbers)}"


def _tree():
    return {"a": np.arange(5000.0), "b": np.ones(3)}


def _holds(path):
    assert np.array_equal(ec.open(path)["a"].read(), _tree()["a"])


def test_both_forms_of_a_url(url):
    ec.tree_serialise_leaves(url, _tree())
    place = url.removeprefix("az://bucket/")
    other = f"abfss://bucket@{servers.ACCOUNT}.dfs.core.windows.net/{place}"
    _holds(other)
    ckpt = pickle.loads(pickle.dumps(ec.open(other)))
    assert ckpt.path == other and (ckpt["b"].read() == 1).all()
    ec.tree_serialise_leaves(other, {"c": np.zeros(2)})
    assert set(ec.open(url).leaves) == {"c"}


def _without_account(patch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        patch.delenv(name, raising=False)


def test_the_account_of_a_url_without_one(url, monkeypatch):
    """Where obstore, fsspec and Azure's own tools look for it."""
    ec.tree_serialise_leaves(url, _tree())
    account = servers.ACCOUNT
    text = f"AccountName={account};AccountKey={servers.KEY}"
    for name, value in [
        ("AZURE_STORAGE_ACCOUNT_NAME", account),
        ("AZURE_STORAGE_ACCOUNT", account),
        ("AZURE_STORAGE_CONNECTION_STRING", text),
    ]:
        with monkeypatch.context() as patch:
            _without_account(patch)
            patch.setenv(name, value)
            _holds(url)
    _without_account(monkeypatch)
    _holds(ec.Store(url, account_name=account))


def test_a_url_without_an_account(monkeypatch):
    pytest.importorskip("obstore")
    _without_account(monkeypatch)
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    with pytest.raises(ValueError, match="which account of Azure `box` is in. Set `AZ"):
        ec.open("az://box/run")
    with pytest.raises(ValueError, match="abfss://box@account.dfs.core.windows.net"):
        ec.tree_serialise_leaves("az://box/run", _tree())


def test_credentials_of_azures_tools(url, az, monkeypatch):
    ec.tree_serialise_leaves(url, _tree())
    endpoint = f"{az.url}/{servers.ACCOUNT}"
    for name in _SET:
        monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        patch.setenv("AZURE_STORAGE_KEY", servers.KEY)
        patch.setenv("AZURE_STORAGE_SERVICE_ENDPOINT", endpoint)
        _holds(url)
    with monkeypatch.context() as patch:
        text = f"AccountName={servers.ACCOUNT};AccountKey={servers.KEY}"
        text += f";BlobEndpoint={endpoint};"
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
        _holds(url)
    monkeypatch.delenv("AZURE_STORAGE_ALLOW_HTTP")
    given = {"account_key": servers.KEY, "endpoint": endpoint}
    _holds(ec.Store(url, allow_http=True, **given))
    with pytest.raises(OSError, match="`AZURE_STORAGE_ALLOW_HTTP=true`"):
        ec.open(ec.Store(url, **given))


def test_no_secret_is_printed(url, az):
    ec.tree_serialise_leaves(url, _tree())
    signature = "sv=2021-08-06&sig=s3cr3tsignature"
    for options in ({"account_key": _OTHER}, {"sas_key": signature}):
        store = ec.Store(url, **options)
        with pytest.raises(PermissionError, match="AZURE_STORAGE_ACCOUNT_KEY") as e:
            ec.open(store)
        text = "".join(traceback.format_exception(e.value)) + repr(store)
        assert _OTHER not in text and "s3cr3tsignature" not in text


def test_what_is_no_url(url):
    for wrong in ("az://a@b/x", "abfss://container@account/x"):
        with pytest.raises(ValueError, match="`az://container/path`"):
            ec.open(wrong)
    # As `pathlib` makes it.
    for wrong in ("az:/account/container/x", "abfss:/x", "hf:/org/name"):
        with pytest.raises(ValueError, match="is not a URL: give one as a string"):
            ec.tree_serialise_leaves(wrong, _tree())
    with pytest.raises(ValueError, match="nonsense"):
        ec.open(ec.Store(url, nonsense=3))
    ec.tree_serialise_leaves(url, _tree())
    for look in (lambda x: x.store, lambda x: x.url):
        with pytest.raises(ValueError, match="TensorStore has no"):
            look(ec.open(url)["a"])
