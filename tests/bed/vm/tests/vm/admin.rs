// SPDX-License-Identifier: MIT OR Apache-2.0

//! Runs the examples of the administrator's guide: writes its files, runs its commands in one shell in their order, and
//! compares their output with the output in the guide.
//!
//! `...` in the guide matches any text, within a line or for any number of lines. `[exit N]` stands for a command whose
//! exit code is not 0. The test replaces the addresses of the guide's devices by those of the guest's devices.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use p2pmem_vm::cluster::Cluster;

use crate::perf::perf;
use crate::{Test, clean, module};

/// The tests.
pub const TESTS: &[Test] = &[Test {
    name: "admin::guide",
    topology: "demo",
    alone: true,
    run: guide,
}];

const GUIDE: &str = include_str!("../../../../../Documentation/admin.md");
/// The guide's addresses of the topology's accel0 and accel1.
const DEVICES: [&str; 2] = ["0000:03:00.0", "0000:0a:00.0"];
/// The separator between the outputs of commands.
const MARK: &str = "=-=-= end of command";

/// A step of the guide.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    File { path: String, text: String },
    Command { line: String, expected: Vec<String> },
}

fn steps(guide: &str) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    let mut lines = guide.lines();
    while let Some(line) = lines.next() {
        let Some(info) = line.strip_prefix("```") else { continue };
        let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        if let Some(path) = info.strip_prefix("toml ") {
            steps.push(Step::File {
                path: path.to_owned(),
                text: block.join("\n") + "\n",
            });
        } else if info == "console" {
            for line in block {
                match (line.strip_prefix("# "), steps.last_mut()) {
                    (Some(command), _) => steps.push(Step::Command {
                        line: command.to_owned(),
                        expected: Vec::new(),
                    }),
                    (None, Some(Step::Command { expected, .. })) => expected.push(line.to_owned()),
                    (None, _) => anyhow::bail!("output of no command: {line:?}"),
                }
            }
        }
    }
    Ok(steps)
}

/// Returns whether a line matches the guide's line, in which `...` matches any text. Any number of blanks counts as
/// one.
fn line_matches(expected: &str, got: &str) -> bool {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let (expected, got) = (words(expected), words(got));
    let mut parts = expected.split("...");
    let Some(mut rest) = got.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else {
        return rest.is_empty();
    };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

/// Returns whether an output matches the guide's, in which a line `...` matches any number of lines.
fn output_matches(expected: &[String], got: &[&str]) -> bool {
    match expected.split_first() {
        None => got.is_empty(),
        Some((first, rest)) if first.trim() == "..." => (0..=got.len()).any(|at| output_matches(rest, &got[at..])),
        Some((first, rest)) => got
            .split_first()
            .is_some_and(|(line, more)| line_matches(first, line) && output_matches(rest, more)),
    }
}

/// Returns a script that runs the steps. It prints each command's output, the exit code if it is not 0, and [`MARK`].
fn script(steps: &[Step], devices: &[(String, String)]) -> Result<String> {
    let real = |text: &str| {
        devices
            .iter()
            .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
    };
    let mut script = String::new();
    for step in steps {
        match step {
            Step::File { path, text } => write!(script, "cat > {path} <<'end of file'\n{}end of file\n", real(text))?,
            Step::Command { line, .. } => writeln!(
                script,
                "{{ {}; }} 2>&1; code=$?; [ $code = 0 ] || echo \"[exit $code]\"; echo '{MARK}'",
                real(line)
            )?,
        }
    }
    Ok(script)
}

fn guide(cluster: &mut Cluster) -> Result<()> {
    let steps = steps(GUIDE)?;
    let module = module()?;
    let perf = perf()?;
    let bin = Path::new(&perf)
        .parent()
        .context("a folder of programs")?
        .display()
        .to_string();
    let vm = cluster.only()?;
    // The guest's `/etc` is that of the sandbox, and read-only.
    let prepared = clean(
        vm,
        &format!(
            "insmod {module} && cp -a /etc /run/etc && mount --bind /run/etc /etc && mkdir -p /etc/p2pmem &&
            echo alice:x:4001:4001::/:/bin/sh >> /etc/passwd && echo bob:x:4002:4002::/:/bin/sh >> /etc/passwd &&
            echo lab:x:5001:alice >> /etc/group && echo $P2PMEM_DEV_ACCEL0 $P2PMEM_DEV_ACCEL1"
        ),
    )?;
    let addresses = String::from_utf8_lossy(&prepared.stdout).into_owned();
    let addresses: Vec<&str> = addresses.split_whitespace().collect();
    ensure!(addresses.len() == DEVICES.len(), "{addresses:?}");
    // Replaced in two steps, through names that neither side uses: an address of the guest may be the address of
    // another device in the guide.
    let mut devices = Vec::new();
    for (n, guide) in DEVICES.iter().enumerate() {
        devices.push(((*guide).to_owned(), format!("<device {n}>")));
    }
    for (n, address) in addresses.iter().enumerate() {
        devices.push((format!("<device {n}>"), (*address).to_owned()));
    }
    let script = format!("PATH={bin}:$PATH\n{}", script(&steps, &devices)?);
    let outcome = clean(vm, &script)?;
    let text = String::from_utf8_lossy(&outcome.stdout).into_owned();
    let mark = format!("{MARK}\n");
    let mut outputs = text.split(&mark);
    let mut run = 0;
    for step in &steps {
        let Step::Command { line, expected } = step else {
            continue;
        };
        let output: Vec<&str> = outputs.next().context("the script ended early")?.lines().collect();
        let expected: Vec<String> = expected
            .iter()
            .map(|line| {
                devices
                    .iter()
                    .fold(line.clone(), |text, (from, to)| text.replace(from, to))
            })
            .collect();
        ensure!(
            output_matches(&expected, &output),
            "# {line}\nthe guide says:\n{}\nbut it says:\n{}",
            expected.join("\n"),
            output.join("\n")
        );
        run += 1;
    }
    ensure!(run >= 20, "the guide has {run} commands only");
    Ok(())
}
