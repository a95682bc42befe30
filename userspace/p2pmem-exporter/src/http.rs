// SPDX-License-Identifier: MIT OR Apache-2.0

//! Serves metrics over HTTP: `GET /metrics` returns OpenMetrics text. The programs of p2pmem that have metrics share it.

use std::fmt;
use std::sync::Arc;

use anyhow::Context as _;
use tiny_http::{Header, Method, Request, Response};

/// Media type of the response.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A server of metrics. It answers one request at a time, because a scrape takes little time.
#[derive(Clone)]
pub struct Server(Arc<tiny_http::Server>);

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Server").field(&self.url()).finish()
    }
}

impl Server {
    /// Listens on an address with a port; port 0 selects a free port.
    ///
    /// # Errors
    ///
    /// The address is not valid or not available.
    pub fn bind(address: &str) -> anyhow::Result<Self> {
        let server = tiny_http::Server::http(address).map_err(anyhow::Error::from_boxed);
        let server = server.with_context(|| format!("cannot listen on {address}"))?;
        Ok(Self(Arc::new(server)))
    }

    /// Returns the address of the metrics.
    pub fn url(&self) -> String {
        format!("http://{}/metrics", self.0.server_addr())
    }

    /// Answers requests until [`stop`](Self::stop). For each scrape, `render` returns the text.
    pub fn serve(&self, mut render: impl FnMut() -> Result<String, fmt::Error>) {
        // recv() returns an error only after unblock().
        while let Ok(request) = self.0.recv() {
            answer(request, &mut render);
        }
    }

    /// Ends [`serve`](Self::serve), which runs in another thread, or is called next.
    pub fn stop(&self) {
        self.0.unblock();
    }
}

/// Answers one request.
fn answer(request: Request, render: &mut dyn FnMut() -> Result<String, fmt::Error>) {
    let path = request.url().split('?').next().unwrap_or_default();
    let reads = matches!(request.method(), Method::Get | Method::Head);
    let (code, text) = match (reads, path) {
        (false, _) => (405, "only GET is supported\n".to_owned()),
        (true, "/metrics") => match render() {
            Ok(text) => (200, text),
            Err(_) => (500, "the metrics cannot be encoded\n".to_owned()),
        },
        (true, "/") => (200, "The metrics are at /metrics.\n".to_owned()),
        (true, _) => (404, "not found: the metrics are at /metrics\n".to_owned()),
    };
    let mut response = Response::from_string(text).with_status_code(code);
    let kind = if code == 200 && path == "/metrics" {
        OPENMETRICS
    } else {
        "text/plain; charset=utf-8"
    };
    if let Ok(header) = Header::from_bytes("Content-Type", kind) {
        response.add_header(header);
    }
    // The client may have closed the connection.
    let _ = request.respond(response);
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    fn get(server: &Server, request: &str) -> String {
        let mut stream = TcpStream::connect(server.0.server_addr().to_ip().unwrap()).unwrap();
        write!(stream, "{request}\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn known_paths_are_served_and_others_refused() {
        let server = Server::bind("127.0.0.1:0").unwrap();
        let serving = server.clone();
        let mut texts = vec![Err(fmt::Error), Ok("b 1\n# EOF\n".into()), Ok("a 1\n# EOF\n".into())];
        let thread = std::thread::spawn(move || serving.serve(|| texts.pop().unwrap()));
        for (request, status, words) in [
            ("GET /metrics HTTP/1.1", 200, "a 1\n# EOF"),
            (
                "GET /metrics?name=x HTTP/1.1",
                200,
                "application/openmetrics-text; version=1.0.0",
            ),
            ("GET / HTTP/1.1", 200, "/metrics"),
            ("GET /other HTTP/1.1", 404, "not found: "),
            ("POST /metrics HTTP/1.1", 405, "only GET"),
            ("GET /metrics HTTP/1.1", 500, "cannot be encoded"),
        ] {
            let answer = get(&server, request);
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status} ")),
                "{request}: {answer}"
            );
            assert!(answer.contains(words), "{request}: {answer}");
        }
        server.stop();
        thread.join().unwrap();
    }

    #[test]
    fn an_address_that_is_in_use_is_named() {
        let server = Server::bind("127.0.0.1:0").unwrap();
        let address = server.0.server_addr().to_string();
        let error = format!("{:#}", Server::bind(&address).unwrap_err());
        assert!(error.starts_with(&format!("cannot listen on {address}: ")), "{error}");
    }
}
