// SPDX-License-Identifier: MIT OR Apache-2.0

//! `publish` and `unpublish`.

use p2pmem::admin::{self, Admin};

use crate::cli::{Mode, PublishArgs, UnpublishArgs};
use crate::{file, Context, Outcome};

fn admin(context: &Context<'_>) -> Admin {
    let environment = context.environment;
    Admin::with_roots(environment.path("sys"), environment.path("sys/kernel/config"))
}

pub(crate) fn publish(context: &mut Context<'_>, args: &PublishArgs) -> anyhow::Result<Outcome> {
    let client = context.client(args.device.name())?;
    let publish = admin::Publish {
        bar: args.bar,
        offset: args.offset,
        size: args.size,
        mode: args.mode.map(|mode| match mode {
            Mode::Paged => admin::Mode::Paged,
            Mode::Pageless => admin::Mode::Pageless,
        }),
        kernel_reserve: args.kernel_reserve,
        pinned_exports: args.pinned_exports.then_some(true),
        attach_gid: args.attach_gid.as_deref().map(file::group).transpose()?,
        rebind: args.force,
        ..admin::Publish::new(client.addr())
    };
    let published = admin(context).publish(&publish)?;
    if context.json {
        context.print_json(&published)?;
    } else if published.status.is_empty() {
        writeln!(context.out, "{} is published", published.addr)?;
    } else {
        writeln!(context.out, "{} is published: {}", published.addr, published.status)?;
    }
    Ok(Outcome::Done)
}

pub(crate) fn unpublish(context: &mut Context<'_>, args: &UnpublishArgs) -> anyhow::Result<Outcome> {
    let client = context.client(args.device.name())?;
    let unpublish = admin::Unpublish::new(client.addr()).reprobe(args.reprobe);
    // The removal waits for all users of the memory; the status names them.
    let other = admin(context);
    let addr = client.addr();
    let status = move || {
        let mut all = other.published().ok()?.into_iter();
        let status = all.find(|published| published.addr == addr)?.status;
        Some(status).filter(|status| !status.is_empty())
    };
    context.waiting(format!("removing {addr}"), status, || {
        admin(context).unpublish(&unpublish)
    })?;
    if context.json {
        context.print_json(&serde_json::json!({ "addr": client.addr(), "enabled": false }))?;
    } else {
        writeln!(context.out, "{} is no longer published", client.addr())?;
    }
    Ok(Outcome::Done)
}
