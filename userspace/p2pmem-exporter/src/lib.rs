// SPDX-License-Identifier: MIT OR Apache-2.0

//! Serves the module's counters and gauges to Prometheus: `GET /metrics` returns OpenMetrics text.

mod metrics;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use clap::Parser;
use p2pmem::rules::Rules;
use p2pmem::Device;
use tiny_http::{Header, Method, Request, Response, Server};

pub use metrics::render;

/// Media type of the response.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serve the metrics of PCI peer-to-peer memory to Prometheus.
///
/// Every scrape queries the module again. If the module is not loaded, p2pmem_up is 0.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    /// Address and port to listen on; port 0 selects a free port.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9835")]
    listen: String,

    /// Device file of p2pmem.
    #[arg(long, value_name = "PATH", env = "P2PMEM_DEV_PATH", hide_env_values = true,
          default_value = p2pmem::DEFAULT_PATH)]
    dev_path: PathBuf,

    /// Print the metrics once, and exit.
    #[arg(long)]
    once: bool,
}

/// Returns the definition of the command line.
pub fn command() -> clap::Command {
    <Cli as clap::CommandFactory>::command()
}

/// Runs the exporter with the process's arguments until SIGTERM or SIGINT.
pub fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("p2pmem-exporter: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    if cli.once {
        let (text, error) = render(|| Device::open_path(&cli.dev_path), &Rules::new())?;
        print!("{text}");
        return error.map_or(Ok(()), |error| Err(error.into()));
    }
    let server = Server::http(&cli.listen).map_err(anyhow::Error::from_boxed);
    let server = Arc::new(server.with_context(|| format!("cannot listen on {}", cli.listen))?);
    println!("serving http://{}/metrics", server.server_addr());
    let ended = server.clone();
    ctrlc::set_handler(move || ended.unblock()).context("cannot catch signals")?;
    serve(&server, &cli.dev_path);
    Ok(())
}

/// Answers requests, one at a time, until the server is unblocked.
fn serve(server: &Server, device: &Path) {
    let mut said = None;
    // recv() returns an error only after unblock().
    while let Ok(request) = server.recv() {
        let error = answer(request, device).map(|error| error.to_string());
        // Print an error only when it changes: the same message at every scrape would fill the log.
        if error != said {
            match &error {
                Some(error) => eprintln!("p2pmem-exporter: {error}"),
                None => eprintln!("p2pmem-exporter: the module is available again"),
            }
            said = error;
        }
    }
}

/// Answers one request. Returns the error if the module is not available.
fn answer(request: Request, device: &Path) -> Option<p2pmem::Error> {
    let path = request.url().split('?').next().unwrap_or_default();
    let reads = matches!(request.method(), Method::Get | Method::Head);
    let (code, text, error) = match (reads, path) {
        (false, _) => (405, "only GET is supported\n".to_owned(), None),
        (true, "/metrics") => match render(|| Device::open_path(device), &Rules::new()) {
            Ok((text, error)) => (200, text, error),
            Err(_) => (500, "the metrics cannot be encoded\n".to_owned(), None),
        },
        (true, "/") => (200, "The metrics are at /metrics.\n".to_owned(), None),
        (true, _) => (404, "not found: the metrics are at /metrics\n".to_owned(), None),
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
    error
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    fn get(server: &Server, request: &str) -> String {
        let mut stream = TcpStream::connect(server.server_addr().to_ip().unwrap()).unwrap();
        write!(stream, "{request}\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn known_paths_are_served_and_others_refused() {
        let server = Arc::new(Server::http("127.0.0.1:0").unwrap());
        let serving = server.clone();
        let thread = std::thread::spawn(move || serve(&serving, Path::new("/nonexistent")));
        for (request, status, words) in [
            ("GET /metrics HTTP/1.1", 200, "p2pmem_up 0\n# EOF"),
            (
                "GET /metrics?name=x HTTP/1.1",
                200,
                "application/openmetrics-text; version=1.0.0",
            ),
            ("GET / HTTP/1.1", 200, "/metrics"),
            ("GET /other HTTP/1.1", 404, "not found: "),
            ("POST /metrics HTTP/1.1", 405, "only GET"),
        ] {
            let answer = get(&server, request);
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status} ")),
                "{request}: {answer}"
            );
            assert!(answer.contains(words), "{request}: {answer}");
        }
        server.unblock();
        thread.join().unwrap();
    }

    #[test]
    fn the_command_line_is_valid() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
