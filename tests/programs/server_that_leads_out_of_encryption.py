"""Opens a file at an HTTPS server with the certificate at `PEM`, which leads to the
HTTP server at `URL`. Prints the error."""

import http.server
import ssl
import sys
import threading

import eqx_ckpt as ec


pem, url = sys.argv[1:]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(302)
        self.send_header("Location", url + self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(pem)
server.socket = context.wrap_socket(server.socket, server_side=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
try:
    ec.open(f"https://localhost:{server.server_port}/m.safetensors")
except OSError as e:
    print(e)
