// SPDX-License-Identifier: MIT OR Apache-2.0

//! `events`: prints events as they arrive.

use std::time::{Duration, Instant};

use p2pmem::{Event, EventKind};

use crate::cli::EventsArgs;
use crate::table::{cell, message, number, on_request, optional, text, wide, Cell, Column, Row, BAD, GOOD, WARNING};
use crate::{Context, Outcome};

pub(crate) fn events(context: &mut Context<'_>, args: &EventsArgs) -> anyhow::Result<Outcome> {
    let Some(table) = args.table.of::<Event>(context)? else {
        return Ok(Outcome::Done);
    };
    let mut events = context.open()?.events();
    let deadline = args.timeout.map(|t| Instant::now() + t);
    let mut left = args.count.unwrap_or(u64::MAX);
    if !context.json {
        write!(context.out, "{}", table.first_line())?;
        context.out.flush()?;
    }
    while left > 0 {
        let wait = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let Some(event) = events.next_within(wait)? else { break };
        if context.json {
            context.print_json_line(&event)?;
        } else {
            write!(context.out, "{}", table.line(&event))?;
        }
        context.out.flush()?;
        left -= 1;
    }
    Ok(Outcome::Done)
}

impl Row for Event {
    const COLUMNS: &'static [Column<Self>] = &[
        wide(
            14,
            number("TIME", "seconds of CLOCK_MONOTONIC", |event, _| {
                cell(format!("{:.6}", Duration::from_nanos(event.time_ns).as_secs_f64()))
            }),
        ),
        wide(18, text("EVENT", "kind of the event", |event, _| kind(&event.kind))),
        wide(
            4,
            number("ID", "id of the provider", |event, _| match event.kind {
                EventKind::ProviderAdded { provider }
                | EventKind::ProviderRemoved { provider }
                | EventKind::BufferRevoked { provider, .. }
                | EventKind::AttachmentRevoked { provider, .. }
                | EventKind::AttachmentStopped { provider, .. } => cell(provider),
                _ => cell(""),
            }),
        ),
        number("HANDLE", "handle of the buffer or attachment", |event, _| {
            match event.kind {
                EventKind::BufferRevoked { handle, .. }
                | EventKind::AttachmentRevoked { handle, .. }
                | EventKind::AttachmentStopped { handle, .. } => cell(handle),
                _ => cell(""),
            }
        }),
        number("COUNT", "number of lost events", |event, _| match event.kind {
            EventKind::Lost { count } => cell(count),
            _ => cell(""),
        }),
        on_request(number("CODE", "number of an unknown event", |event, _| {
            optional(match event.kind {
                EventKind::Unknown { code } => Some(code),
                _ => None,
            })
        })),
        on_request(message("MESSAGE", "the event in words", |event, _| cell(event))),
    ];
}

fn kind(kind: &EventKind) -> Cell {
    match kind {
        EventKind::ProviderAdded { .. } => cell("provider-added").style(GOOD),
        EventKind::ProviderRemoved { .. } => cell("provider-removed").style(WARNING),
        EventKind::BufferRevoked { .. } => cell("buffer-revoked").style(BAD),
        EventKind::AttachmentRevoked { .. } => cell("attachment-revoked").style(BAD),
        EventKind::AttachmentStopped { .. } => cell("attachment-stopped").style(BAD),
        EventKind::Lost { .. } => cell("lost").style(BAD),
        _ => cell("unknown"),
    }
}
