import pytest

from flce_tune.errors import ServiceError
from flce_tune.service.settings import ServiceSettings

URL = "sqlite:///x.sqlite3"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1"])
def test_loopback_needs_no_token(host: str):
    ServiceSettings(URL, host=host).refuse_exposure(has_tokens=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "gpu-box.example"])
def test_refuses_to_listen_for_others_without_a_token(host: str):
    with pytest.raises(ServiceError, match=r"FLCE_TUNE_TOKEN.*--insecure"):
        ServiceSettings(URL, host=host).refuse_exposure(has_tokens=False)
    ServiceSettings(URL, host=host).refuse_exposure(has_tokens=True)
    ServiceSettings(URL, host=host, token="secret").refuse_exposure(has_tokens=False)
    ServiceSettings(URL, host=host, insecure=True).refuse_exposure(has_tokens=False)


def test_an_empty_token_is_none_at_all():
    with pytest.raises(ServiceError, match="empty"):
        ServiceSettings(URL, host="0.0.0.0", token="")


def test_the_token_is_not_shown():
    assert "secret" not in repr(ServiceSettings(URL, token="secret"))
