// Shows the description of the server that the page is from.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#description",
  deepLinking: true,
  tryItOutEnabled: true,
  // The validator would be another host.
  validatorUrl: null,
});
