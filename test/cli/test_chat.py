"""`kvdrive chat` against a small server that speaks SGLang's side of the protocol."""

import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console
from sglang_kvdrive.cli import main
from sglang_kvdrive.cli.chat import Chat, flatten
from sglang_kvdrive.cli.client import ServerClient, ServerError
from sglang_kvdrive.cli.progress import prefill_figures
from sglang_kvdrive.errors import ConfigError, KVDriveError


class FakeServer(ThreadingHTTPServer):
    """Answers every question with `pieces`; `kvdrive` is its state; keeps the bodies it got."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kvdrive = {"hit_rate": 0.75, "hbm": {"used_bytes": 1234567}, "mode": "sparse"}
        self.pieces = ["Par", "is."]
        self.status = 200
        self.bodies = []
        self.hang_after = None
        self.client_left = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_args):
        pass

    def do_GET(self):
        state = {} if self.server.kvdrive is None else {"kvdrive": self.server.kvdrive}
        self._reply(json.dumps({"served_model_name": "tiny", "internal_states": [state]}))

    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.status != 200:
            self._reply(json.dumps({"object": "error", "message": "too long: 9000 of 8192 tokens"}), self.server.status)
            return
        self.send_response(200)
        self.end_headers()
        for index, piece in enumerate(self.server.pieces):
            if index == self.server.hang_after:
                self._wait_for_the_client_to_leave()
                return
            self._event({"choices": [{"delta": {"content": piece}, "finish_reason": None}]})
        self._event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 2}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _wait_for_the_client_to_leave(self):
        try:
            for _ in range(500):
                self.wfile.write(b": still working\n\n")
                time.sleep(0.01)
        except OSError:
            self.server.client_left.set()

    def _event(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _reply(self, text, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server():
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def chat(server):
    console = Console(file=io.StringIO(), width=200, highlight=False, soft_wrap=True)
    chat = Chat(ServerClient(server.url), console, max_tokens=32)
    chat.printed = console.file.getvalue
    return chat


def test_an_answer_is_streamed_and_kept_for_the_next_question(chat, server):
    chat.handle("capital of France?")
    chat.handle("and of Spain?")
    assert "Paris." in chat.printed()
    assert "12 + 2 tokens" in chat.printed()
    first, second = server.bodies
    assert first["stream"] is True
    assert first["max_tokens"] == 32
    assert first["temperature"] == 0
    assert "custom_params" not in first
    assert [message["content"] for message in second["messages"]] == ["capital of France?", "Paris.", "and of Spain?"]


def test_a_file_goes_before_the_next_question_only(chat, server, tmp_path):
    (tmp_path / "notes.txt").write_text("the code is 4711")
    chat.handle(f"/file {tmp_path / 'notes.txt'}")
    chat.handle("what is the code?")
    chat.handle("sure?")
    assert server.bodies[0]["messages"][0]["content"] == "the code is 4711\n\nwhat is the code?"
    assert server.bodies[1]["messages"][-1]["content"] == "sure?"


@pytest.mark.parametrize(("name", "reason"), [("", "needs the name"), ("/no/such/file", "No such file")])
def test_a_file_that_cannot_be_read_is_refused(chat, name, reason):
    with pytest.raises(ConfigError, match=reason):
        chat.handle(f"/file {name}")


def test_reset_forgets_the_conversation(chat, server):
    chat.handle("one")
    chat.handle("/reset")
    chat.handle("two")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["two"]


def test_stats_prints_the_state_of_kvdrive(chat):
    chat.handle("/stats")
    assert "hbm.used_bytes" in chat.printed()
    assert "1,234,567" in chat.printed()
    assert "0.75" in chat.printed()


def test_stats_of_a_server_without_kvdrive_says_how_to_get_them(chat, server):
    server.kvdrive = None
    with pytest.raises(KVDriveError, match="--kv-manager kvdrive"):
        chat.handle("/stats")


def test_dense_is_refused_where_the_server_has_no_budgets_per_request(chat, server):
    with pytest.raises(KVDriveError, match="does not offer per-request budgets"):
        chat.handle("/dense")
    chat.handle("hello")
    assert "custom_params" not in server.bodies[0]


def test_dense_is_sent_where_the_server_offers_it_until_switched_off(chat, server):
    server.kvdrive["per_request_budget"] = True
    chat.handle("/dense")
    chat.handle("one")
    chat.handle("/dense")
    chat.handle("two")
    assert server.bodies[0]["custom_params"] == {"kvdrive": {"budget": "dense"}}
    assert "custom_params" not in server.bodies[1]


def test_a_refused_question_shows_the_reason_of_the_server_and_is_not_kept(chat, server):
    server.status = 400
    with pytest.raises(ServerError, match="answered 400: too long: 9000 of 8192 tokens"):
        chat.handle("long")
    server.status = 200
    chat.handle("short")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["short"]


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat, server, monkeypatch):
    server.pieces, server.hang_after = ["Once ", "upon"], 1
    printed = chat._console.print

    def interrupt_after_the_first_piece(*args, **kwargs):
        printed(*args, **kwargs)
        if args[:1] == ("Once ",):
            raise KeyboardInterrupt

    monkeypatch.setattr(chat._console, "print", interrupt_after_the_first_piece)
    chat.handle("tell me a story")
    assert "(stopped)" in chat.printed()
    assert server.client_left.wait(5), "the connection stays open, so the server would go on generating"
    server.hang_after = None
    chat.handle("go on")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["tell me a story", "Once ", "go on"]


@pytest.mark.parametrize("flags", [["--max-tokens", "0"], ["--temperature", "-1"]])
def test_sampling_out_of_range_is_refused_with_the_limit(flags, capsys):
    assert main.main(["chat", *flags]) == 2
    assert f"{flags[0]} is {flags[1]}, it must be at least" in capsys.readouterr().err


def test_an_unknown_command_lists_the_known_ones(chat, server):
    chat.handle("/what")
    chat.handle("")
    assert "/what is not a command" in chat.printed()
    assert "/stats" in chat.printed()
    assert server.bodies == []


def test_the_loop_ends_at_quit_and_at_the_end_of_input_and_survives_errors(server, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("/file\nhello\n/quit\nnever sent\n"))
    assert main.main(["chat", "--url", server.url]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("again\n"))
    assert main.main(["chat", "--url", server.url]) == 0
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["hello", "again"]
    out = capsys.readouterr().out
    assert "tiny at http://127.0.0.1" in out
    assert "managed by KVDrive" in out
    assert "/file needs the name" in out


def test_a_server_that_is_not_there_is_a_message_and_not_a_traceback(capsys):
    assert main.main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert "no answer from http://127.0.0.1:9" in err
    assert "make serve" in err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://host:port", "http://h:99999999"])
def test_a_bad_url_is_refused(url):
    with pytest.raises(ConfigError, match="must look like"):
        ServerClient(url)


def test_prefill_figures_are_shown_only_when_the_server_has_them():
    assert prefill_figures(None) is None
    assert prefill_figures({"prefill": {"total_tokens": 0}}) is None
    assert prefill_figures({"prefill": {"done_tokens": 2048, "total_tokens": 7000}}) == (2048, 7000)


def test_nested_state_becomes_dotted_names():
    assert list(flatten({"a": {"b": 1000, "c": True}, "d": 0.123456})) == [("a.b", "1,000"), ("a.c", "True"), ("d", "0.1235")]
