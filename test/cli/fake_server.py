"""A stand-in for `sglang.launch_server`: a child process that dies with it, a port, and a file in /dev/shm."""

import argparse
import mmap
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--kv-manager")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--exit-code", type=int, help="end at once")
    args = parser.parse_args()
    if args.exit_code is not None:
        sys.exit(args.exit_code)

    code = "import ctypes, signal, time; ctypes.CDLL(None).prctl(1, signal.SIGKILL); time.sleep(600)"
    grandchild = subprocess.Popen([sys.executable, "-c", code])
    shm = os.open(f"/dev/shm/sglang_loads_kvdrive_test_{os.getpid()}.shm", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(shm, 4096)
    mapped = mmap.mmap(shm, 4096)
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = HTTPServer((args.host, args.port), Health)
    print(f"pids {os.getpid()} {grandchild.pid} {len(mapped)}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
