// SPDX-License-Identifier: MIT OR Apache-2.0

//! `plot`: draws a JSON report as SVG, for papers.
//!
//! The members of the report decide what is drawn: one chart for each kind of results, one below the other. Reports of other
//! programs may have further members.

mod canvas;
mod charts;
mod data;

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};
use clap::Args;

use canvas::Drawing;
use data::Document;

/// The most bytes of a report.
const MAX_REPORT: u64 = 64 << 20;

/// Options of `plot`.
#[derive(Debug, Args)]
pub struct PlotArgs {
    /// The report: the output of run, matrix, stream, or rpc with --json, of p2pmem-training --json, or transfer.json; - for standard input.
    pub report: PathBuf,

    /// File for the SVG document [default: standard output]
    #[arg(long, short = 'o', value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Draws the report.
///
/// # Errors
///
/// The report cannot be read, or has nothing to draw. The message says what to do.
pub fn run(args: &PlotArgs, out: &mut dyn Write) -> Result<()> {
    let text = read(&args.report)?;
    let svg = draw(&text).with_context(|| args.report.display().to_string())?;
    match &args.output {
        None => Ok(out.write_all(svg.as_bytes())?),
        Some(path) => std::fs::write(path, svg).with_context(|| format!("writing {}", path.display())),
    }
}

fn read(path: &Path) -> Result<String> {
    let mut text = String::new();
    let count = if path.as_os_str() == "-" {
        std::io::stdin().take(MAX_REPORT + 1).read_to_string(&mut text)
    } else {
        File::open(path).and_then(|file| file.take(MAX_REPORT + 1).read_to_string(&mut text))
    };
    let count = count.with_context(|| format!("cannot read the report {}", path.display()))?;
    ensure!(
        count as u64 <= MAX_REPORT,
        "{} has more than {MAX_REPORT} bytes: is it a report of p2pmem-perf?",
        path.display()
    );
    Ok(text)
}

/// Returns the SVG document of a report.
///
/// # Errors
///
/// The text is no report, or has nothing to draw.
pub fn draw(text: &str) -> Result<String> {
    let document: Document = serde_json::from_str(text)
        .context("this is no report: specify the output of p2pmem-perf run, matrix, stream, or rpc with --json")?;
    let mut drawing = Drawing::default();
    charts::run(&mut drawing, &document);
    for matrix in document.matrices() {
        charts::matrix(&mut drawing, matrix);
    }
    charts::rpc(&mut drawing, &document.rpc);
    charts::decomposition(&mut drawing, &document.decomposition);
    charts::formula(&mut drawing, &document.formula);
    if let Some(ports) = &document.multi_port {
        charts::multi_port(&mut drawing, ports);
    }
    if let Some(curve) = &document.training {
        charts::losses(&mut drawing, curve);
    }
    charts::stream(&mut drawing, &document);
    if drawing.is_empty() {
        bail!(
            "the report has nothing to draw: it has no results, matrix, rpc, decomposition, formula, multi_port, losses, or rates of a stream"
        );
    }
    Ok(drawing.svg())
}

#[cfg(test)]
mod tests;
