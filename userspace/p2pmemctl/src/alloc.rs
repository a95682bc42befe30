// SPDX-License-Identifier: MIT OR Apache-2.0

//! `alloc` and `explain`.

use std::io::{BufRead, IsTerminal};
use std::process::Command;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{bail, Context as _};
use p2pmem::{
    human_size, Buffer, CandidateDevice, Device, ErrorKind, EventKind, Explanation, PathClass, PciAddr, Request,
    Stripe, Verdict, VerdictCode, WhatIf,
};
use serde::Serialize;

use crate::cli::{AllocArgs, ExplainArgs, PlacementArgs, Strategy};
use crate::computed::{Access, Computed};
use crate::table::{self, cell, message, number, on_request, optional, text, Column, Row, Table, FAINT, GOOD};
use crate::{scan, Advised, Context, Outcome};

/// Bytes per step of `fill()`. Each step moves the progress bar.
const STEP: usize = 1 << 20;

pub(crate) fn request(
    context: &Context<'_>,
    device: &Device,
    size: u64,
    args: &PlacementArgs,
) -> anyhow::Result<Request> {
    let strategy = match args.strategy {
        Strategy::Nearest => p2pmem::Strategy::Nearest,
        Strategy::Upstream => p2pmem::Strategy::Upstream,
        Strategy::Spread => p2pmem::Strategy::Spread,
        Strategy::Pack => p2pmem::Strategy::Pack,
        Strategy::Stripe => p2pmem::Strategy::Stripe,
    };
    let mut request = Request::new(size)
        .align(args.align)
        .near(context.clients(&args.near)?)
        .strategy(strategy)
        .parts(args.parts);
    if let Some(name) = &args.device {
        request = request.provider(context.provider(device, name)?.id);
    }
    if let Some(name) = &args.prefer {
        request = request.prefer(context.provider(device, name)?.id);
    }
    if let Some(class) = args.max_class {
        request = request.max_class(class);
    }
    Ok(request)
}

pub(crate) fn explain(context: &mut Context<'_>, args: &ExplainArgs) -> anyhow::Result<Outcome> {
    if args.what_if {
        return what_if(context, args);
    }
    let Some(table) = args.table.of::<Verdict>(context)? else {
        return Ok(Outcome::Done);
    };
    let device = (context.environment.open)().map_err(|error| match error.kind() {
        ErrorKind::ModuleMissing => anyhow::Error::new(Advised {
            error,
            remedy:
                "load the module (modprobe p2pmem). Without the module, --what-if decides over all devices with memory from sysfs",
        }),
        _ => error.into(),
    })?;
    let request = request(context, &device, args.request.size, &args.request.placement)?;
    let explanation = device.explain(&request)?;
    if context.json {
        context.print_json(&explanation)?;
    } else if args.table.is_plain() {
        write!(context.out, "{}", table.render(&explanation.verdicts))?;
    } else {
        write!(context.out, "{}", render_explanation(&explanation, &table))?;
    }
    Ok(Outcome::of(explanation.errno.is_none()))
}

/// The decision over all devices with memory.
#[derive(Serialize)]
struct WhatIfReport {
    #[serde(flatten)]
    answer: WhatIf,
    /// How the answer can differ from the module's; none with the module.
    computed: Option<Computed>,
}

fn what_if(context: &mut Context<'_>, args: &ExplainArgs) -> anyhow::Result<Outcome> {
    let Some(table) = args.table.of::<CandidateDevice>(context)? else {
        return Ok(Outcome::Done);
    };
    let placement = &args.request.placement;
    let clients = context.clients(&placement.near)?;
    let mut request = Request::new(args.request.size)
        .align(placement.align)
        .near(clients.iter().cloned());
    if let Some(class) = placement.max_class {
        request = request.max_class(class);
    }
    let access = context.access()?;
    let (device, without) = match &access {
        Access::Module(device) => (Some(device), None),
        Access::Sysfs(without) => (None, Some(without)),
    };
    let answer = WhatIf::decide_in(&context.environment.root, device, &request)?;
    let computed = without.map(|without| {
        let memory = answer.candidates.iter().map(|candidate| candidate.verdict.addr);
        let addrs: Vec<_> = memory.chain(clients.iter().map(p2pmem::Client::addr)).collect();
        without.computed(context.environment, &addrs)
    });
    let report = WhatIfReport { answer, computed };
    if context.json {
        context.print_json(&report)?;
    } else if args.table.is_plain() {
        write!(context.out, "{}", table.render(&report.answer.candidates))?;
    } else {
        write!(context.out, "{}", render_what_if(&report, &table))?;
        if let Some(computed) = &report.computed {
            context.hint(&computed.advice());
        }
    }
    Ok(Outcome::of(report.answer.errno.is_none()))
}

fn render_what_if(report: &WhatIfReport, table: &Table<CandidateDevice>) -> String {
    let WhatIfReport { answer, computed } = report;
    let heading = computed.as_ref().map(Computed::heading).unwrap_or_default();
    if answer.candidates.is_empty() {
        return format!("{heading}{}: this machine has no device with memory\n", answer.text);
    }
    let mut out = format!("{heading}{}\n\n{}", answer.text, table.render(&answer.candidates));
    out += "\nWhat each device needs:\n";
    for candidate in &answer.candidates {
        out += &format!("  {}: {}\n", candidate.verdict.addr, candidate.source.detail);
    }
    out
}

impl Row for CandidateDevice {
    const COLUMNS: &'static [Column<Self>] = &[
        number("ID", "id of the provider; - if the device is not a provider", |c, _| {
            optional(Some(c.verdict.provider).filter(|id| *id != 0))
        }),
        text("DEVICE", "PCI address of the device", |c, _| cell(c.verdict.addr)),
        text("CLASS", "class of the path to the farthest client", |c, _| {
            optional(c.verdict.class)
        }),
        on_request(number("HOPS", "links to all clients together", |c, _| {
            cell(c.verdict.hops)
        })),
        on_request(number("BANDWIDTH", "MB/s of the narrowest link", |c, _| {
            optional(c.verdict.bandwidth)
        })),
        number("SIZE", "size of the memory", |c, sizes| sizes.cell(c.verdict.size)),
        on_request(number(
            "FREE",
            "free bytes; all if the memory is not published",
            |c, sizes| sizes.cell(c.verdict.free),
        )),
        text("SOURCE", "interface that would hand out the memory", |c, _| {
            cell(c.source.backend)
        }),
        text(
            "USABLE",
            "ready, possible after a step of the administrator, or no",
            |c, _| scan::usable(c.source.availability),
        ),
        on_request(text("CODE", "the verdict in one word", |c, _| {
            cell(code(c.verdict.code))
        })),
        on_request(message("DETAIL", "what the source needs", |c, _| {
            cell(&c.source.detail)
        })),
        message("VERDICT", "the verdict, with the numbers that decided", |c, _| {
            cell(&c.verdict.why).style(match c.verdict.code {
                VerdictCode::Chosen => GOOD,
                _ => FAINT,
            })
        }),
    ];
}

/// Returns the columns of both tables of `explain`, for the help.
pub(crate) fn columns_help() -> String {
    let verdicts = table::help::<Verdict>("Columns");
    let devices = table::help::<CandidateDevice>("Columns with --what-if");
    format!("{verdicts}\n\n{devices}")
}

impl Row for Verdict {
    const COLUMNS: &'static [Column<Self>] = &[
        number("ID", "id of the provider", |v, _| cell(v.provider)),
        text("DEVICE", "PCI address of the provider", |v, _| cell(v.addr)),
        on_request(text("CODE", "the verdict in one word", |v, _| cell(code(v.code)))),
        on_request(text("CLASS", "class of the path to the farthest client", |v, _| {
            optional(v.class)
        })),
        on_request(number("HOPS", "links to all clients together", |v, _| cell(v.hops))),
        on_request(number("BANDWIDTH", "MB/s of the narrowest link", |v, _| {
            optional(v.bandwidth)
        })),
        on_request(number("SIZE", "size of the provider's memory", |v, sizes| {
            sizes.cell(v.size)
        })),
        on_request(number("FREE", "free bytes at the time of the decision", |v, sizes| {
            sizes.cell(v.free)
        })),
        on_request(number("LARGEST", "largest contiguous free piece", |v, sizes| {
            sizes.cell(v.largest)
        })),
        on_request(text("RULE", "rule that decided", |v, _| {
            optional(v.rule.as_ref().map(|rule| &rule.name))
        })),
        message("VERDICT", "the verdict, with the numbers that decided", |v, _| {
            cell(&v.why).style(match v.code {
                VerdictCode::Chosen => GOOD,
                _ => FAINT,
            })
        }),
    ];
}

/// Returns the word for a verdict, as in JSON.
fn code(code: VerdictCode) -> String {
    match serde_json::to_value(code) {
        Ok(serde_json::Value::String(word)) => word,
        // The type is an enum of words.
        _ => String::new(),
    }
}

pub(crate) fn render_explanation(explanation: &Explanation, table: &Table<Verdict>) -> String {
    let outcome = explanation.lines().into_iter().next().unwrap_or_default();
    if explanation.verdicts.is_empty() {
        return format!("{outcome}\n");
    }
    format!("{outcome}\n\n{}", table.render(&explanation.verdicts))
}

/// Location of a buffer.
#[derive(Serialize)]
struct Location {
    handle: u32,
    provider: u32,
    addr: Option<PciAddr>,
    bar: Option<u32>,
    bar_offset: Option<u64>,
    size: u64,
    class: Option<PathClass>,
}

/// A part of a stripe.
#[derive(Serialize)]
struct Part {
    /// Offset in the stripe.
    offset: u64,
    #[serde(flatten)]
    location: Location,
}

/// Result of `alloc`.
#[derive(Serialize)]
#[serde(untagged)]
enum Allocated {
    Buffer {
        #[serde(flatten)]
        location: Location,
        explanation: Explanation,
    },
    Stripe {
        size: u64,
        parts: Vec<Part>,
        explanation: Explanation,
    },
}

impl Allocated {
    fn locations(&self) -> Vec<&Location> {
        match self {
            Self::Buffer { location, .. } => vec![location],
            Self::Stripe { parts, .. } => parts.iter().map(|part| &part.location).collect(),
        }
    }
}

pub(crate) fn alloc(context: &mut Context<'_>, args: &AllocArgs) -> anyhow::Result<Outcome> {
    let device = context.open()?;
    let request = request(context, &device, args.request.size, &args.request.placement)?;
    let stripe = matches!(args.request.placement.strategy, Strategy::Stripe);
    let made = context.allocating(args.request.size, || {
        if stripe {
            device.alloc_stripe(&request).map(Stripe::into_parts)
        } else {
            device.alloc(&request).map(|buffer| vec![buffer])
        }
    });
    let buffers = match made {
        Ok(buffers) => buffers,
        Err(error) => {
            // The error has the reason as a message; the explanation adds the verdict for each provider.
            if let (false, Ok(explanation)) = (context.json, device.explain_last()) {
                let text = render_explanation(&explanation, &Table::default());
                write!(context.out, "{text}")?;
            }
            return Err(error.into());
        }
    };
    // `explain()` would see the memory after the allocation; `explain_last()` returns the decision of the allocation.
    let allocated = allocated(&device, &buffers, stripe, device.explain_last()?)?;
    if context.json {
        context.print_json(&allocated)?;
    } else {
        writeln!(context.out, "{}", render_allocated(&allocated))?;
    }
    context.out.flush()?;
    if let Some(byte) = args.fill {
        for buffer in &buffers {
            fill(context, buffer, byte)?;
        }
    }
    if let Some((program, arguments)) = args.exec.split_first() {
        return exec(program, arguments, &allocated);
    }
    if args.hold {
        return hold(context, &device, &buffers);
    }
    for buffer in buffers {
        buffer.free()?;
    }
    if !context.json {
        writeln!(
            context.out,
            "The memory is free again. To keep it, use --hold, or --exec COMMAND to run a program with it."
        )?;
    }
    Ok(Outcome::Done)
}

fn allocated(device: &Device, buffers: &[Buffer], stripe: bool, explanation: Explanation) -> anyhow::Result<Allocated> {
    let providers = device.providers()?;
    let mut end = 0;
    let parts = buffers.iter().map(|buffer| {
        let provider = providers.iter().find(|p| p.id == buffer.provider());
        let offset = end;
        end += buffer.size();
        let location = Location {
            handle: buffer.handle(),
            provider: buffer.provider(),
            addr: provider.map(|p| p.addr),
            bar: provider.and_then(|p| p.bar),
            bar_offset: buffer.bar_offset(),
            size: buffer.size(),
            class: buffer.class(),
        };
        Part { offset, location }
    });
    let mut parts: Vec<_> = parts.collect();
    Ok(match parts.pop() {
        Some(Part { location, .. }) if !stripe => Allocated::Buffer { location, explanation },
        last => {
            parts.extend(last);
            Allocated::Stripe {
                size: end,
                parts,
                explanation,
            }
        }
    })
}

fn render_allocated(allocated: &Allocated) -> String {
    match allocated {
        Allocated::Buffer { location, .. } => render_location(location),
        Allocated::Stripe { size, parts, .. } => {
            let head = format!("{} in {} parts", human_size(*size), parts.len());
            let lines = parts
                .iter()
                .map(|part| format!("\n  at offset {:#x}: {}", part.offset, render_location(&part.location)));
            lines.fold(head, |text, line| text + &line)
        }
    }
}

fn render_location(location: &Location) -> String {
    let mut line = format!("{} in provider {}", human_size(location.size), location.provider);
    if let Some(addr) = location.addr {
        line += &format!(" ({addr})");
    }
    if let (Some(bar), Some(offset)) = (location.bar, location.bar_offset) {
        line += &format!(", BAR {bar} at offset {offset:#x}");
    }
    if let Some(class) = location.class {
        line += &format!(", farthest path: {class} ({})", class.meaning());
    }
    line
}

fn fill(context: &Context<'_>, buffer: &Buffer, byte: u8) -> anyhow::Result<()> {
    let mapping = buffer.map()?;
    let bar = context.progress_bar("filling", buffer.size());
    let mut at = 0;
    while at < mapping.len() {
        let end = mapping.len().min(at + STEP);
        mapping.fill(at..end, byte)?;
        at = end;
        bar.set_position(at as u64);
    }
    mapping.flush();
    bar.finish_and_clear();
    Ok(())
}

/// The event that ends a hold.
enum End {
    Enter,
    Signal,
}

fn hold(context: &mut Context<'_>, device: &Device, buffers: &[Buffer]) -> anyhow::Result<Outcome> {
    let (sender, ends) = mpsc::channel();
    let on_signal = sender.clone();
    ctrlc::set_handler(move || {
        // If the receiver is gone, the program is already exiting.
        let _ = on_signal.send(End::Signal);
    })
    .context("cannot catch signals")?;
    std::thread::spawn(move || {
        let mut line = String::new();
        // End of file does not count as Enter: a program in the background holds the buffer until a signal.
        if matches!(std::io::stdin().lock().read_line(&mut line), Ok(n) if n > 0) {
            let _ = sender.send(End::Enter);
        }
        // Keep the channel open, so that the receiver does not see a disconnect.
        std::mem::forget(sender);
    });
    if !context.json {
        let keys = if std::io::stdin().is_terminal() {
            "Enter or Ctrl-C"
        } else {
            "a line of input or a signal"
        };
        writeln!(context.out, "holding the buffer until {keys}")?;
        context.out.flush()?;
    }
    let mut events = device.events();
    loop {
        match ends.recv_timeout(Duration::from_millis(200)) {
            Ok(End::Enter | End::Signal) | Err(RecvTimeoutError::Disconnected) => return Ok(Outcome::Done),
            Err(RecvTimeoutError::Timeout) => {}
        }
        while let Some(event) = events.next_within(Some(Duration::ZERO))? {
            let EventKind::BufferRevoked { handle, .. } = event.kind else {
                continue;
            };
            if let Some(buffer) = buffers.iter().find(|buffer| buffer.handle() == handle) {
                bail!("the buffer was revoked: provider {} was removed", buffer.provider());
            }
        }
    }
}

fn exec(program: &str, arguments: &[String], allocated: &Allocated) -> anyhow::Result<Outcome> {
    // Ctrl-C goes to the command; this process waits for the command's end and frees the buffer then.
    ctrlc::set_handler(|| {}).context("cannot catch signals")?;
    let mut command = Command::new(program);
    command.args(arguments);
    // For a stripe, each variable is a list in the order of the parts.
    let locations = allocated.locations();
    let mut list = |name: &str, of: &dyn Fn(&Location) -> Option<String>| {
        let known: Option<Vec<_>> = locations.iter().map(|location| of(location)).collect();
        if let Some(known) = known {
            command.env(name, known.join(","));
        }
    };
    list("P2PMEM_PROVIDER", &|location| Some(location.provider.to_string()));
    list("P2PMEM_SIZE", &|location| Some(location.size.to_string()));
    list("P2PMEM_PROVIDER_ADDR", &|location| {
        location.addr.map(|addr| addr.to_string())
    });
    list("P2PMEM_BAR_OFFSET", &|location| {
        location.bar_offset.map(|offset| offset.to_string())
    });
    let status = command.status().with_context(|| format!("cannot run {program}"))?;
    if !status.success() {
        bail!("{program} failed: {status}");
    }
    Ok(Outcome::Done)
}
