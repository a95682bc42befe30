// SPDX-License-Identifier: MIT OR Apache-2.0

//! The paths below `/api`: start and stop of measurements, and export of results.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::extract::{Extension, State};
use axum::http::header::{CONTENT_DISPOSITION, CONTENT_TYPE};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::Router;
use clap::Parser;
use p2pmem_web::{ApiError, Json, PathParts, Peer};
use serde::Deserialize;

use super::args::ServerAddress;
use super::export;
use super::state::{Gauge, Request};
use crate::cli::{Cli, Command};

type Answer = Result<Response, ApiError>;

pub(super) fn routes(gauge: Arc<Gauge>) -> Router {
    Router::new()
        .route("/run", post(run))
        .route("/matrix", post(matrix))
        .route("/jobs/{id}/stop", post(stop))
        .route("/export.json", get(export_json))
        .route("/export.csv", get(export_csv))
        .with_state(gauge)
}

/// A run that a viewer requests, in the words of the command line.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewRun {
    memory: String,
    peer_memory: String,
    mode: String,
    size: String,
    messages: u64,
    nics: Vec<String>,
    #[serde(default)]
    staged: bool,
    #[serde(default)]
    verify: bool,
}

/// A matrix that a viewer requests, in the words of the command line.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewMatrix {
    memory: Vec<String>,
    peer_memory: Vec<String>,
    modes: Vec<String>,
    size: String,
    messages: u64,
    nics: Vec<String>,
    #[serde(default)]
    staged: bool,
    #[serde(default)]
    verify: bool,
}

/// Options of the command line, so that requests have the same checks and defaults.
struct Words(Vec<String>);

impl Words {
    fn new(command: &str, server: &ServerAddress) -> Self {
        let mut words = Self(vec!["p2pmem-perf".into(), command.into()]);
        words.option("port", &server.port.to_string());
        words
    }

    /// Adds an option. Its value cannot become another option.
    fn option(&mut self, name: &str, value: &str) {
        self.0.push(format!("--{name}={value}"));
    }

    /// Adds an option without a value.
    fn flag(&mut self, name: &str, is_set: bool) {
        if is_set {
            self.0.push(format!("--{name}"));
        }
    }

    fn parse(mut self, server: &ServerAddress) -> Result<Command, String> {
        self.0.extend(["--".to_owned(), server.host.clone()]);
        Cli::try_parse_from(self.0).map(|cli| cli.command).map_err(|error| {
            let text = error.to_string();
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            let lines: Vec<_> = lines.take_while(|line| !line.starts_with("For more")).collect();
            lines.join("; ").trim_start_matches("error: ").to_owned()
        })
    }
}

/// Returns the names of the selected things, with commas.
fn list(names: &[String], what: &str) -> Result<String, String> {
    if names.is_empty() {
        return Err(format!("nothing is selected: select {what}"));
    }
    if let Some(name) = names.iter().find(|name| name.contains(',') || name.is_empty()) {
        return Err(format!("{name:?} is no name: select {what}"));
    }
    // A NIC may be named with its port, which is the first one of all NICs.
    let mut known = BTreeSet::new();
    for name in names {
        if !known.insert(name.strip_suffix("/1").unwrap_or(name)) {
            return Err(format!("{name:?} is selected twice"));
        }
    }
    Ok(names.join(","))
}

impl NewRun {
    /// Returns the options of the run. An empty kind of the server's memory is the server's own.
    pub(super) fn request(&self, server: &ServerAddress) -> Result<Request, String> {
        let mut words = Words::new("run", server);
        words.option("memory", &self.memory);
        if !self.peer_memory.is_empty() {
            words.option("peer-memory", &self.peer_memory);
        }
        words.option("mode", &self.mode);
        words.option("size", &self.size);
        words.option("iters", &self.messages.to_string());
        words.option("nic", &list(&self.nics, "at least one NIC")?);
        words.flag("staged", self.staged);
        words.flag("verify", self.verify);
        let Command::Run(args) = words.parse(server)? else {
            return Err("the request is no run".into());
        };
        args.test(self.nics.len()).check()?;
        Ok(Request::Run(Box::new(args)))
    }
}

impl NewMatrix {
    pub(super) fn request(&self, server: &ServerAddress) -> Result<Request, String> {
        let mut words = Words::new("matrix", server);
        words.option("memory", &list(&self.memory, "memory of this node")?);
        words.option("peer-memory", &list(&self.peer_memory, "memory of the server")?);
        words.option(
            "mode",
            &list(
                &self.modes,
                "at least one mode, beside which staged writes are measured",
            )?,
        );
        words.option("size", &self.size);
        words.option("iters", &self.messages.to_string());
        words.option("nic", &list(&self.nics, "at least one NIC")?);
        words.flag("staged", self.staged);
        words.flag("verify", self.verify);
        let Command::Matrix(args) = words.parse(server)? else {
            return Err("the request is no matrix".into());
        };
        // The first run of a matrix checks the same numbers. Here, the viewer gets the answer.
        let run = NewRun {
            memory: self.memory[0].clone(),
            peer_memory: self.peer_memory[0].clone(),
            mode: self.modes[0].clone(),
            size: self.size.clone(),
            messages: self.messages,
            nics: self.nics.clone(),
            staged: false,
            verify: self.verify,
        };
        run.request(server)?;
        Ok(Request::Matrix(Box::new(args)))
    }
}

fn begin(gauge: &Arc<Gauge>, request: Result<Request, String>, peer: Peer) -> Answer {
    let request = request.map_err(|why| ApiError::new(StatusCode::BAD_REQUEST, why))?;
    let by = peer.0.to_canonical().to_string();
    let id = gauge
        .start(request, by)
        .map_err(|why| ApiError::new(StatusCode::CONFLICT, why))?;
    let body = serde_json::json!({ "id": id }).to_string();
    Ok((StatusCode::ACCEPTED, [(CONTENT_TYPE, "application/json")], body).into_response())
}

async fn run(State(gauge): State<Arc<Gauge>>, Extension(peer): Extension<Peer>, Json(new): Json<NewRun>) -> Answer {
    begin(&gauge, new.request(gauge.server()), peer)
}

async fn matrix(
    State(gauge): State<Arc<Gauge>>,
    Extension(peer): Extension<Peer>,
    Json(new): Json<NewMatrix>,
) -> Answer {
    begin(&gauge, new.request(gauge.server()), peer)
}

async fn stop(
    State(gauge): State<Arc<Gauge>>,
    Extension(peer): Extension<Peer>,
    PathParts(id): PathParts<u64>,
) -> Answer {
    if gauge.stop(id, peer.0.to_canonical().to_string()) {
        Ok(StatusCode::NO_CONTENT.into_response())
    } else {
        Err(ApiError::new(
            StatusCode::NOT_FOUND,
            format!("measurement {id} does not run; it may have ended already"),
        ))
    }
}

fn download(kind: &'static str, name: &'static str, content: String) -> Response {
    let name = format!("attachment; filename=\"{name}\"");
    ([(CONTENT_TYPE, kind.to_owned()), (CONTENT_DISPOSITION, name)], content).into_response()
}

async fn export_json(State(gauge): State<Arc<Gauge>>) -> Answer {
    let json = serde_json::to_string_pretty(&gauge.results()).map_err(ApiError::internal)?;
    Ok(download("application/json", "p2pmem-gauge.json", json))
}

async fn export_csv(State(gauge): State<Arc<Gauge>>) -> Answer {
    let csv = export::csv(&gauge.results());
    Ok(download("text/csv; charset=utf-8", "p2pmem-gauge.csv", csv))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_selected_once() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            list(&names(&["mlx5_0", "mlx5_1/1"]), "NICs"),
            Ok("mlx5_0,mlx5_1/1".into())
        );
        for (wrong, why) in [
            (&["cpu", "cmb", "cpu"][..], "selected twice"),
            (&["mlx5_0", "mlx5_0/1"], "selected twice"),
            (&["cpu,cmb"], "no name"),
            (&[""], "no name"),
            (&[], "nothing is selected"),
        ] {
            let error = list(&names(wrong), "memory").unwrap_err();
            assert!(error.contains(why), "{wrong:?}: {error}");
        }
    }
}
