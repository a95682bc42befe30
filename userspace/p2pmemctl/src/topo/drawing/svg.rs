// SPDX-License-Identifier: MIT OR Apache-2.0

//! The SVG document of a drawing.

use svg::node::element::{Line, Rectangle, Text as TextElement, Title};
use svg::Document;

use super::layout::{Layout, Look, Rect, Text, TextBox, CLIENT_MARK};
use super::tree::Role;

/// Fonts whose characters have one width.
const FONTS: &str = "DejaVu Sans Mono, Liberation Mono, Menlo, Consolas, monospace";
/// The color of clients' marks.
const CLIENT: &str = "#1d63c4";
/// The color of warnings.
const WARNING: &str = "#b3261e";
/// The colors of bands, from the outermost to those in other bands.
const BANDS: [&str; 2] = ["#e6effa", "#d3e3f5"];

/// The fill, the color of the border, and the width of the border.
fn style(role: Role) -> (&'static str, &'static str, u32) {
    match role {
        Role::HostBridge => ("#e9e9ec", "#55555c", 1),
        Role::RootPort | Role::Port | Role::Bridge => ("#ffffff", "#8a8a92", 1),
        Role::Switch => ("#bcd6f2", "#2f5f93", 2),
        Role::Provider => ("#bfe6c3", "#1f7a34", 3),
        Role::Memory => ("#fff3c9", "#a97c00", 1),
        Role::Client => ("#ffffff", "#1d63c4", 1),
    }
}

fn rectangle(rect: Rect) -> Rectangle {
    Rectangle::new()
        .set("x", rect.x)
        .set("y", rect.y)
        .set("width", rect.width)
        .set("height", rect.height)
}

fn text(text: &Text) -> TextElement {
    let element = TextElement::new(text.content.as_str())
        .set("x", text.x)
        .set("y", text.y)
        .set("font-size", text.font());
    match text.look {
        Look::Title | Look::Name => element.set("font-weight", "bold"),
        Look::Warning => element.set("fill", WARNING),
        Look::Plain => element,
    }
}

fn add_box(document: Document, text_box: &TextBox) -> Document {
    let (fill, border, width) = style(text_box.role);
    let (border, width) = if text_box.has_warning {
        (WARNING, 2)
    } else {
        (border, width)
    };
    let frame = rectangle(text_box.rect)
        .set("rx", 3)
        .set("fill", fill)
        .set("stroke", border)
        .set("stroke-width", width);
    let mut document = document.add(frame);
    if text_box.is_client {
        let mark = Rect {
            width: CLIENT_MARK,
            ..text_box.rect
        };
        document = document.add(rectangle(mark).set("fill", CLIENT));
    }
    for content in &text_box.texts {
        document = document.add(text(content));
    }
    if let Some((bar, used)) = text_box.usage {
        let part = Rect { width: used, ..bar };
        document = document
            .add(rectangle(bar).set("fill", "#ffffff").set("stroke", border))
            .add(rectangle(part).set("fill", border));
    }
    document
}

/// Returns the document.
pub(super) fn document(layout: &Layout) -> String {
    let whole = Rect {
        x: 0,
        y: 0,
        width: layout.width,
        height: layout.height,
    };
    let mut document = Document::new()
        .set("viewBox", (0, 0, layout.width, layout.height))
        .set("width", layout.width)
        .set("height", layout.height)
        .set("font-family", FONTS)
        .add(Title::new("PCI topology"))
        .add(rectangle(whole).set("fill", "#ffffff"));
    for (n, band) in layout.bands.iter().enumerate() {
        let outer = layout.bands.iter().take(n).any(|other| contains(other, band));
        let color = if outer { BANDS[1] } else { BANDS[0] };
        document = document.add(
            rectangle(*band)
                .set("rx", 6)
                .set("fill", color)
                .set("stroke", "#a9c4e2"),
        );
    }
    for link in &layout.links {
        let line = Line::new()
            .set("x1", link.from)
            .set("x2", link.to)
            .set("y1", link.y)
            .set("y2", link.y);
        document = document.add(line.set("stroke", "#55555c").set("stroke-width", 2));
    }
    for text_box in &layout.boxes {
        document = add_box(document, text_box);
    }
    for content in &layout.texts {
        document = document.add(text(content));
    }
    format!("{document}\n")
}

/// Returns whether a rectangle is in another one.
fn contains(outer: &Rect, inner: &Rect) -> bool {
    outer.x <= inner.x
        && outer.y <= inner.y
        && outer.x + outer.width >= inner.x + inner.width
        && outer.y + outer.height >= inner.y + inner.height
}
