// SPDX-License-Identifier: MIT OR Apache-2.0

//! `slurm`: lets Slurm hand out the bytes of providers as a generic resource (GRES), and holds jobs to their bytes by rules.

use std::path::{Path, PathBuf};

use anyhow::{bail, Context as _};
use p2pmem::rules::Rules;
use p2pmem::{human_size, PciAddr, Provider, ProviderState};
use serde::Serialize;

use crate::cli::{SlurmCommand, SlurmEpilogArgs, SlurmGresArgs, SlurmJobArgs, SlurmPrologArgs};
use crate::{Context, Outcome};

mod amount;
mod controller;
mod cores;
mod jobs;
mod limits;

use cores::Cores;
use jobs::Job;
pub(crate) use limits::is_rule;
use limits::{name, Limits};

pub(crate) fn run(context: &mut Context<'_>, command: &SlurmCommand) -> anyhow::Result<Outcome> {
    let rules = Rules::with_root(context.environment.path("sys/kernel/config"));
    match command {
        SlurmCommand::Gres(args) => gres(context, args),
        SlurmCommand::Prolog(args) => prolog(context, args, &rules),
        SlurmCommand::Epilog(args) => epilog(context, args, &rules),
    }
}

/// Runs an operation on the rules while no prolog or epilog changes them.
pub(crate) fn with_lock<T>(context: &Context<'_>, operation: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let folder = folder(context);
    // Without jobs in this boot, there is nothing to lock.
    let _jobs = folder.exists().then(|| jobs::Jobs::lock(&folder)).transpose()?;
    operation()
}

fn folder(context: &Context<'_>) -> PathBuf {
    context.environment.path(jobs::FOLDER)
}

/// The memory of the providers that are near the same cores. Slurm accepts one line of gres.conf for each type of a resource.
#[derive(Debug, Serialize)]
struct Resource {
    providers: Vec<PciAddr>,
    bytes: u64,
    /// Type of the resource: the NUMA node; `None` if there is one resource.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// Slurm's numbers of the cores near the providers; `None` if all cores are equally near.
    cores: Option<String>,
}

/// The resources of a node, and the lines that describe them to Slurm.
#[derive(Debug, Serialize)]
struct NodeResources {
    node: String,
    resources: Vec<Resource>,
    gres_conf: Vec<String>,
    slurm_conf: Vec<String>,
}

fn gres(context: &mut Context<'_>, args: &SlurmGresArgs) -> anyhow::Result<Outcome> {
    amount::check_name(&args.name)?;
    let node = match &args.node {
        Some(node) => node.clone(),
        None => host_name(context)?,
    };
    let all = context.open()?.providers()?;
    let described = describe(context, &node, &args.name, &all)?;
    if let Some(path) = &args.write {
        write(path, &node, &args.name, &described.gres_conf)?;
    }
    if context.json {
        context.print_json(&described)?;
        return Ok(Outcome::Done);
    }
    let lines = |lines: &[String]| lines.join("\n") + "\n";
    match &args.write {
        None => write!(context.out, "# In gres.conf:\n{}\n", lines(&described.gres_conf))?,
        Some(path) => context.hint(&format!(
            "wrote {} lines to {}",
            described.gres_conf.len(),
            path.display()
        )),
    }
    write!(
        context.out,
        "# In slurm.conf, added to what it has:\n{}",
        lines(&described.slurm_conf)
    )?;
    Ok(Outcome::Done)
}

/// Returns the name of this machine, which is NodeName in slurm.conf unless that says otherwise.
fn host_name(context: &Context<'_>) -> anyhow::Result<String> {
    let name = context.environment.read("proc/sys/kernel/hostname").unwrap_or_default();
    match name.split('.').next() {
        Some(name) if !name.is_empty() => Ok(name.to_owned()),
        _ => bail!("this machine has no name: pass its NodeName of slurm.conf by --node"),
    }
}

fn describe(context: &Context<'_>, node: &str, name: &str, all: &[Provider]) -> anyhow::Result<NodeResources> {
    let cores = Cores::read(context.environment);
    let mut resources: Vec<Resource> = Vec::new();
    for provider in all.iter().filter(|provider| provider.state == ProviderState::Live) {
        let near = provider.numa_node.and_then(|node| Some((node, cores.near(node)?)));
        let kind = near
            .as_ref()
            .map_or_else(|| "any".to_owned(), |(node, _)| format!("numa{node}"));
        let kind = Some(kind);
        match resources.iter_mut().find(|resource| resource.kind == kind) {
            Some(resource) => {
                resource.providers.push(provider.addr);
                resource.bytes += provider.size;
            }
            None => resources.push(Resource {
                providers: vec![provider.addr],
                bytes: provider.size,
                kind,
                cores: near.map(|(_, cores)| cores),
            }),
        }
    }
    match resources.as_mut_slice() {
        [] => bail!("there are no providers to describe: run `p2pmemctl publish DEVICE` or `p2pmemctl apply` before"),
        [only] => only.kind = None,
        _ => {}
    }
    let line = |resource: &Resource| {
        let optional = |key: &str, value: &Option<String>| match value {
            Some(value) => format!(" {key}={value}"),
            None => String::new(),
        };
        let providers: Vec<_> = resource.providers.iter().map(ToString::to_string).collect();
        format!(
            "NodeName={node} Name={name}{} Count={}{} Flags=CountOnly # {}",
            optional("Type", &resource.kind),
            amount::count(resource.bytes),
            optional("Cores", &resource.cores),
            providers.join(", ")
        )
    };
    let counts = resources.iter().map(|resource| {
        let kind = resource.kind.as_ref().map(|kind| format!(":{kind}"));
        format!("{name}{}:{}", kind.unwrap_or_default(), amount::count(resource.bytes))
    });
    let mut slurm_conf = vec![
        format!("GresTypes={name}"),
        format!("NodeName={node} Gres={}", counts.collect::<Vec<_>>().join(",")),
    ];
    if cores.has_nodes_in_sockets() && resources.iter().any(|resource| resource.cores.is_some()) {
        // Slurm's topology of GRES is one of sockets.
        slurm_conf.push("SlurmdParameters=numa_node_as_socket".to_owned());
    }
    Ok(NodeResources {
        node: node.to_owned(),
        gres_conf: resources.iter().map(line).collect(),
        slurm_conf,
        resources,
    })
}

/// Replaces the lines of the node and the resource in a gres.conf, and keeps all others.
fn write(path: &Path, node: &str, name: &str, lines: &[String]) -> anyhow::Result<()> {
    let before = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        text => text.with_context(|| path.display().to_string())?,
    };
    let is_own = |line: &&str| {
        let value = |key: &str| {
            line.split_whitespace()
                .filter_map(|word| word.split_once('='))
                .find_map(|(word, value)| word.eq_ignore_ascii_case(key).then_some(value))
        };
        value("NodeName") == Some(node) && value("Name") == Some(name)
    };
    let kept = before.lines().filter(|line| !is_own(line));
    let text: String = kept
        .chain(lines.iter().map(String::as_str))
        .fold(String::new(), |text, line| text + line + "\n");
    // Renamed, so that slurmd reads one of the two files, complete.
    let mut new = path.as_os_str().to_owned();
    new.push(".part");
    let new = PathBuf::from(new);
    std::fs::write(&new, text).with_context(|| new.display().to_string())?;
    std::fs::rename(&new, path).with_context(|| path.display().to_string())
}

/// What a prolog or an epilog did.
#[derive(Debug, Serialize)]
struct Done {
    job: u32,
    uid: u32,
    /// Bytes of the job; `None` in an epilog.
    bytes: Option<u64>,
    /// Bytes that all jobs of the user on this node have.
    quota: u64,
    /// Bytes that the user holds; `None` in a prolog.
    held: Option<u64>,
    /// Name of the user's rule; `None` if the user has none.
    rule: Option<String>,
}

fn prolog(context: &mut Context<'_>, args: &SlurmPrologArgs, rules: &Rules) -> anyhow::Result<Outcome> {
    let SlurmJobArgs { job: id, uid } = args.job;
    amount::check_name(&args.name)?;
    let node = match &args.node {
        Some(node) => node.clone(),
        None => host_name(context)?,
    };
    let gres = match &args.gres {
        Some(gres) => gres.clone(),
        None => controller::gres_of(&args.scontrol, id, uid, &node)?,
    };
    let bytes = amount::bytes(&gres, &args.name)?;
    let mut done = Done {
        job: id,
        uid,
        bytes: Some(bytes),
        quota: 0,
        held: None,
        rule: None,
    };
    if bytes > 0 {
        let limits = Limits {
            rules,
            folder: folder(context),
        };
        let job = Job { id, uid, bytes };
        let started = limits.start(&job);
        done.quota = started.with_context(|| format!("job {id} of uid {uid} has no limit, and must not start"))?;
        done.rule = Some(name(uid));
    }
    if context.json {
        context.print_json(&done)?;
    } else if bytes == 0 {
        writeln!(context.out, "job {id} of uid {uid} has no {}: no rule", args.name)?;
    } else {
        writeln!(
            context.out,
            "job {id} of uid {uid} has {}: rule {} limits the user to {}",
            human_size(bytes),
            name(uid),
            human_size(done.quota)
        )?;
    }
    Ok(Outcome::Done)
}

fn epilog(context: &mut Context<'_>, args: &SlurmEpilogArgs, rules: &Rules) -> anyhow::Result<Outcome> {
    let SlurmJobArgs { job: id, uid } = args.job;
    let limits = Limits {
        rules,
        folder: folder(context),
    };
    let rest = limits
        .end(id, uid, args.wait)
        .with_context(|| format!("the limit of job {id} of uid {uid} was not removed"))?;
    if rest.quota == 0 && rest.held > 0 {
        bail!(
            "uid {uid} still holds {} after its last job, {id}: end the processes that `p2pmemctl top` shows, run \
             `p2pmemctl slurm epilog --job {id} --uid {uid}`, and resume the node",
            human_size(rest.held)
        );
    }
    if context.json {
        context.print_json(&Done {
            job: id,
            uid,
            bytes: None,
            quota: rest.quota,
            held: Some(rest.held),
            rule: (rest.quota > 0).then(|| name(uid)),
        })?;
        return Ok(Outcome::Done);
    }
    let other = match rest.quota {
        0 => String::new(),
        quota => format!("; other jobs of the user have {}", human_size(quota)),
    };
    let what = if rest.known { "has ended" } else { "had no limit" };
    writeln!(context.out, "job {id} of uid {uid} {what}{other}")?;
    if rest.held > rest.quota {
        context.hint(&format!(
            "uid {uid} holds {}, more than its other jobs have: it gets no more until it holds less than {}",
            human_size(rest.held),
            human_size(rest.quota)
        ));
    }
    Ok(Outcome::Done)
}

#[cfg(test)]
mod tests;
