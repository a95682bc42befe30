// SPDX-License-Identifier: MIT OR Apache-2.0

//! Asks Slurm's controller what a job has on a node. A prolog's environment does not have it. The answer is JSON: in
//! scontrol's plain text, a user could imitate other lines by the name of a job.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{bail, ensure, Context as _};
use serde::Deserialize;

/// The longest wait for scontrol, which tries again while the controller does not answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// What `scontrol --json --details show job` prints, without what nobody needs here.
#[derive(Debug, Deserialize)]
struct Answer {
    jobs: Vec<JobInfo>,
}

#[derive(Debug, Deserialize)]
struct JobInfo {
    job_id: u32,
    user_id: u32,
    /// What the job has on each node, in the order of the nodes. Empty if it has no GRES.
    #[serde(default)]
    gres_detail: Vec<String>,
    job_resources: Option<Resources>,
}

#[derive(Debug, Deserialize)]
struct Resources {
    nodes: Nodes,
}

#[derive(Debug, Deserialize)]
struct Nodes {
    #[serde(default)]
    allocation: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    name: String,
}

/// Returns the list of a job's GRES on a node, such as `gpu:1(IDX:0),p2pmem(CNT:67108864)`; empty if it has none there.
pub(super) fn gres_of(program: &str, id: u32, uid: u32, node: &str) -> anyhow::Result<String> {
    let text = ask(program, id).with_context(|| {
        format!("the GRES of job {id} are unknown; name the folder of scontrol in PATH, or pass --scontrol or --gres")
    })?;
    parse(&text, id, uid, node)
}

fn ask(program: &str, id: u32) -> anyhow::Result<Vec<u8>> {
    let child = Command::new(program)
        .args(["--json", "--details", "show", "job", &id.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program}"))?;
    output(child, PATIENCE).with_context(|| program.to_owned())
}

/// Returns the output of a program that succeeds within a time, else kills it.
fn output(mut child: Child, patience: Duration) -> anyhow::Result<Vec<u8>> {
    fn read(from: Option<impl Read + Send + 'static>) -> mpsc::Receiver<std::io::Result<Vec<u8>>> {
        let (sender, receiver) = mpsc::sync_channel(1);
        std::thread::spawn(move || {
            let mut all = Vec::new();
            let read = from.map_or(Ok(0), |mut from| from.read_to_end(&mut all));
            // The receiver is gone if this took too long.
            let _ = sender.send(read.map(|_| all));
        });
        receiver
    }
    let (out, err) = (read(child.stdout.take()), read(child.stderr.take()));
    let Ok(out) = out.recv_timeout(patience) else {
        let _ = child.kill();
        let _ = child.wait();
        bail!("no answer within {} s: is slurmctld running?", patience.as_secs());
    };
    let status = child.wait()?;
    if !status.success() {
        let err = err.recv_timeout(patience).ok().and_then(Result::ok).unwrap_or_default();
        let err = String::from_utf8_lossy(&err).trim().replace('\n', "; ");
        bail!("{status}: {err}");
    }
    Ok(out?)
}

fn parse(text: &[u8], id: u32, uid: u32, node: &str) -> anyhow::Result<String> {
    let answer: Answer = serde_json::from_slice(text).with_context(|| format!("scontrol's answer about job {id}"))?;
    let Some(job) = answer.jobs.iter().find(|job| job.job_id == id) else {
        bail!("scontrol knows no job {id}");
    };
    ensure!(
        job.user_id == uid,
        "job {id} is one of uid {}, not of uid {uid}: check --job and --uid",
        job.user_id
    );
    if job.gres_detail.is_empty() {
        return Ok(String::new());
    }
    let nodes = job
        .job_resources
        .as_ref()
        .map_or(&[][..], |resources| &resources.nodes.allocation);
    ensure!(
        nodes.len() == job.gres_detail.len(),
        "scontrol names {} nodes of job {id}, and GRES of {}: pass --gres",
        nodes.len(),
        job.gres_detail.len()
    );
    match nodes.iter().zip(&job.gres_detail).find(|(at, _)| at.name == node) {
        Some((_, gres)) => Ok(gres.clone()),
        None => bail!("job {id} does not run on node {node}: pass this node's NodeName of slurm.conf by --node"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(gres: &str) -> String {
        format!(
            r#"{{"jobs": [{{"job_id": 12, "user_id": 4001, "name": "x Nodes=a GRES=p2pmem(CNT:1)", {gres}
                "job_resources": {{"nodes": {{"count": 2, "list": "a,b", "allocation": [
                    {{"index": 0, "name": "a"}}, {{"index": 1, "name": "b"}}]}}}}}}], "errors": []}}"#
        )
    }

    #[test]
    fn gres_of_the_node_are_found() {
        let both = answer(r#""gres_detail": ["p2pmem(CNT:67108864)", "gpu:1(IDX:0)"],"#);
        assert_eq!(parse(both.as_bytes(), 12, 4001, "a").unwrap(), "p2pmem(CNT:67108864)");
        assert_eq!(parse(both.as_bytes(), 12, 4001, "b").unwrap(), "gpu:1(IDX:0)");
        for none in ["", r#""gres_detail": [],"#] {
            assert_eq!(parse(answer(none).as_bytes(), 12, 4001, "a").unwrap(), "");
        }
    }

    #[test]
    fn wrong_answers_are_errors() {
        let both = answer(r#""gres_detail": ["p2pmem(CNT:1)", ""],"#);
        let one = answer(r#""gres_detail": ["p2pmem(CNT:1)"],"#);
        for (text, id, uid, node, said) in [
            (both.as_str(), 12, 4001, "c", "job 12 does not run on node c"),
            (&both, 12, 4002, "a", "job 12 is one of uid 4001, not of uid 4002"),
            (&both, 13, 4001, "a", "scontrol knows no job 13"),
            (&one, 12, 4001, "a", "scontrol names 2 nodes of job 12, and GRES of 1"),
            ("{}", 12, 4001, "a", "scontrol's answer about job 12"),
            ("", 12, 4001, "a", "scontrol's answer about job 12"),
        ] {
            let error = format!("{:#}", parse(text.as_bytes(), id, uid, node).unwrap_err());
            assert!(error.contains(said), "{error}");
        }
    }

    fn shell(script: &str, patience: Duration) -> anyhow::Result<Vec<u8>> {
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        output(command.spawn().unwrap(), patience)
    }

    #[test]
    fn scontrol_that_fails_or_hangs_is_an_error() {
        let long = Duration::from_secs(60);
        assert_eq!(shell("echo answer", long).unwrap(), b"answer\n");
        let error = shell("echo one >&2; echo two >&2; exit 3", long)
            .unwrap_err()
            .to_string();
        assert_eq!(error, "exit status: 3: one; two");
        let error = shell("exec sleep 600", Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("is slurmctld running?"), "{error}");
        let error = format!("{:#}", gres_of("/nonexistent/scontrol", 1, 2, "a").unwrap_err());
        assert!(
            error.contains("pass --scontrol or --gres") && error.contains("cannot run"),
            "{error}"
        );
    }
}
