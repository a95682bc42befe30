// SPDX-License-Identifier: MIT OR Apache-2.0

//! Serves the module's counters and gauges to Prometheus: `GET /metrics` returns OpenMetrics text.

pub mod http;
mod metrics;

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use p2pmem::rules::Rules;
use p2pmem::Device;

pub use metrics::render;

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
    let server = http::Server::bind(&cli.listen)?;
    println!("serving {}", server.url());
    let ended = server.clone();
    ctrlc::set_handler(move || ended.stop()).context("cannot catch signals")?;
    server.serve(scrapes(&cli.dev_path));
    Ok(())
}

/// Returns a function that returns the metrics of each scrape. If the module is not available, it prints why.
fn scrapes(device: &Path) -> impl FnMut() -> Result<String, fmt::Error> + '_ {
    let mut said = None;
    move || {
        let (text, error) = render(|| Device::open_path(device), &Rules::new())?;
        let error = error.map(|error| error.to_string());
        // Print an error only when it changes: the same message at every scrape would fill the log.
        if error != said {
            match &error {
                Some(error) => eprintln!("p2pmem-exporter: {error}"),
                None => eprintln!("p2pmem-exporter: the module is available again"),
            }
            said = error;
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_module_scrapes_succeed() {
        let mut scrape = scrapes(Path::new("/nonexistent"));
        assert!(scrape().unwrap().contains("p2pmem_up 0\n# EOF"));
        assert!(scrape().unwrap().contains("p2pmem_up 0\n# EOF"));
    }

    #[test]
    fn the_command_line_is_valid() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
