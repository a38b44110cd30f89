"""A GPU, a problem, and a line to a service that can be cut."""

import httpx

from flce_tune.service.executors import LocalExecutor
from flce_tune.tuning_db.records import DeviceRecord, ProblemRecord, ToolchainRecord

GPU = DeviceRecord("cuda", "NVIDIA H200", "9.0", 132, 232448, 150_000_000_000)
TOOLCHAIN = ToolchainRecord("2.13.0", "3.7.1", "13.0", "580.1", "0" * 64)
PROBLEM = ProblemRecord("train", "bfloat16", "fp32", 4096, 128256, 4096)
SPEC = {
    "device": "sm_90",
    "problems": [{"tokens": 4096, "hidden": 4096, "vocab": 128256}],
}


class OneGpu(LocalExecutor):
    """A GPU that is not here."""

    def devices(self) -> dict[str, DeviceRecord]:
        return {"cuda:0": GPU}


class Line(httpx.BaseTransport):
    """The way to the service, which can be cut before or after a request is heard."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport
        self.cut = False
        self.lost_answers = 0  # of the next posts

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.cut:
            raise httpx.ConnectError("cut")
        answer = self._transport.handle_request(request)
        if self.lost_answers and request.method == "POST":
            self.lost_answers -= 1
            raise httpx.ReadError("the answer was lost")
        return answer
